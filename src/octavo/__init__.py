"""Octavo: a serving engine for large language models."""

__version__ = "0.1.0"
