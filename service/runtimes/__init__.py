"""Runtimes, which run the application over its engines: in one process, or under Ray Serve."""
