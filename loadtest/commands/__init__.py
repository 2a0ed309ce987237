"""The commands of `python -m triptych.loadtest`."""
