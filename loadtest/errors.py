"""Errors that people caused or can mend: one line, no traceback."""

from __future__ import annotations


class UsageError(Exception):
    """What was asked for cannot be: the message names what, found, expected. Exit code 2."""


class ServerError(Exception):
    """The server cannot be measured: it is not there or refuses the probe. Exit code 1."""
