"""Measuring: the machine's limits, the engine beside them, and servers under load."""
