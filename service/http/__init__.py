"""HTTP itself: bodies, headers, replies, server-sent events."""
