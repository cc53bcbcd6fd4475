"""Measuring: the engine beside the machine's limits, and servers under load."""
