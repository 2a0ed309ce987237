"""Processes that may be killed, for chat templates and grammars of strangers."""
