"""The state of a running service: its models, accepted requests, readiness and draining."""
