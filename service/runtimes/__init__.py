"""The service over its engines, in one process or under Ray Serve."""
