"""The one exception whose message is meant for the person who started the run."""

from __future__ import annotations


class UserError(Exception):
    """Bad input or a bad environment: one line that names the cause and what to do about it."""
