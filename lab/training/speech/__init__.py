"""Trains `speech`, a small Whisper, on speech that espeak-ng makes."""
