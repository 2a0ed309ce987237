"""Clients, connections and the processes that drive them."""
