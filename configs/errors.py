"""Exceptions whose message is meant for the person who started the run."""

from __future__ import annotations


class UserError(Exception):
    """Bad input or a bad environment: one line that names the cause and what to do about it."""

    def __init__(self, message: str) -> None:
        # The names of files may hold line ends, and sequences that a terminal obeys.
        super().__init__("".join(c if c.isprintable() else _escaped(c) for c in message))


class NotFiniteError(UserError):
    """Training has met a number that is not finite, in this epoch (from 0)."""

    def __init__(self, message: str, epoch: int) -> None:
        super().__init__(message)
        self.epoch = epoch


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
