"""Damage to the content of files, and values of any kind, for the fuzz tests."""

from __future__ import annotations

from hypothesis import strategies as st

# How a content is damaged: where (a fraction of its length), what is put there, and whether it
# replaces what was there, is put before it, or all that follows is cut off.
damages = st.tuples(
    st.floats(0, 1), st.binary(max_size=12), st.sampled_from(["replace", "insert", "cut"])
)


def damaged(content: bytes, damage: tuple[float, bytes, str]) -> bytes:
    place, noise, kind = damage
    at = int(place * len(content))
    rest = {"replace": content[at + len(noise) :], "insert": content[at:], "cut": b""}[kind]
    return content[:at] + noise + rest


json_scalars = st.one_of(
    st.none(), st.booleans(), st.floats(), st.text(max_size=4),
    st.sampled_from([0, -1, 1, 2**31, 2**63, -(2**70), 10**400]),
)  # fmt: skip
