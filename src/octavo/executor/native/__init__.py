"""The executor that computes on this machine's CPU, in C++."""
