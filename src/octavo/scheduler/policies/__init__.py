"""Scheduling policies: one file each, listed in policies/config.py."""
