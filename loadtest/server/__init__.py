"""The server under load: its properties and metrics."""
