"""Accepted requests, the parts of a running service, draining."""
