"""Runs, mixes and sweeps: their flags, their execution, and their output files."""
