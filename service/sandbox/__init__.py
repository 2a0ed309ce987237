"""Processes that can be killed, for chat templates and for grammars of clients."""
