"""The commands of `python -m loadtest`."""
