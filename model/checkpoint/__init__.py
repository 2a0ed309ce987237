"""Folders with a model in them: their files, checked before anything is loaded."""
