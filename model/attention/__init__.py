"""Attention over packed segments and paged keys and values: the protocol, the reference, the fast backends."""
