"""The sections of a recording of what users see (benchmarks/behaviour.py)."""
