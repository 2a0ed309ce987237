"""The load generator: clients, connections, and the worker processes that drive them."""
