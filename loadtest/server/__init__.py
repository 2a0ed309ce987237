"""The service under load: its state, its metrics."""
