"""Which sequences take part in a step, and which KV blocks they hold. No torch."""
