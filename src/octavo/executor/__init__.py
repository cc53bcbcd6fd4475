"""Executors compute the steps that the scheduler makes: native, reference and simulated."""
