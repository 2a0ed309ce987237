"""Metrics, traces and logs of the service."""
