"""Errors that a user caused or can correct; they are printed as one line, without a traceback."""

from __future__ import annotations


class UsageError(Exception):
    """Says that a setting is invalid; the message names it, what was found and what is expected. Exit code 2."""


class ServerError(Exception):
    """Says that the server cannot be measured: it is not reachable or refuses the first request. Exit code 1."""
