"""Converts request bodies to engine requests, and refuses bodies that cannot be served."""
