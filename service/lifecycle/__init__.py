"""The state of a running service: accepted requests, readiness, draining."""
