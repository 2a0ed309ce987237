"""Runs and sweeps over a service, and where their files go."""
