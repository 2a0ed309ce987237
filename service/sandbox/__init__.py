"""Confined processes, which can be killed, for chat templates, grammars of clients, images and audio files."""
