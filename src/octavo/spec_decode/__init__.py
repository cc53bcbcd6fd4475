"""Guess and check: drafters, how much to draft, and verification."""
