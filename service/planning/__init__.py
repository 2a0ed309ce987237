"""Bodies to requests: everything that is refused is refused here."""
