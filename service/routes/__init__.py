"""The routes, one file for each kind of work. Each only reads, plans, runs and replies."""
