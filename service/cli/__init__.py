"""The command line `triptych`."""
