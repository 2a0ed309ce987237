"""Confined processes, which can be killed, for chat templates, and for grammars and files of clients."""
