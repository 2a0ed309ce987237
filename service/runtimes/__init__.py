"""Runtimes, which run the application with its engines: in one process, or under Ray Serve."""
