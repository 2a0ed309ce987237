"""Workloads: the content, lengths and times of requests."""
