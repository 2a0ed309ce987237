"""The settings of the service: their table, their sources, and the configuration built from them."""
