"""The command `triptych`."""
