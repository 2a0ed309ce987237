"""What the holders of keys may do: quotas; and what they did: usage."""
