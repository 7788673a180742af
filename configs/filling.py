"""Strict filling of documented dataclasses from plain mappings, as YAML gives them.

A dataclass declares each key with `setting(default, meaning, ...)`. `fill` builds it from a mapping
and refuses unknown keys, wrong types and values out of range, in a line that names the dotted key.
Understood types: str, bool, int, float, each also with `| None`; tuple[X, ...]; nested dataclasses.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import reprlib
import types
import typing
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from configs.errors import UserError

T = TypeVar("T")
LARGEST_INT = 2**63 - 1  # what PyTorch's and NumPy's integers hold
PLAIN_NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a value (for a list: each item) may be; None and empty mean no limit."""

    choices: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    length: int | None = None  # exact number of items in a list
    nonempty: bool = False  # a list needs at least one item
    pattern: str | None = None  # regular expression for the whole text
    pattern_meaning: str = ""

    def bounds(self) -> str:
        """The numeric range in words, e.g. `>= 0 and < 1`; empty where there is none."""
        signs = ((">=", self.at_least), (">", self.above), ("<=", self.at_most), ("<", self.below))
        return " and ".join(f"{sign} {bound}" for sign, bound in signs if bound is not None)

    def admits(self, number: float) -> bool:
        """Whether the number lies in the range."""
        return (
            (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
        )


@dataclasses.dataclass(frozen=True)
class Key:
    """The documentation of one key: dotted name, allowed values, default and meaning in words."""

    name: str
    allowed: str
    default: str
    meaning: str


def setting(default: Any, meaning: str, **limits: Any) -> Any:
    """A dataclass field with its meaning (one sentence) and `Limits`; `...` makes it required."""
    metadata = {"meaning": meaning, "limits": Limits(**limits)}
    if default is ...:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def describe(kind: type, prefix: str = "") -> list[Key]:
    """All keys of a dataclass, nested ones included; N stands for a list index."""
    keys = []
    for field, hint in typed_fields(kind):
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hint):
            keys += describe(hint, f"{name}.")
            continue
        allowed = _allowed(hint, _limits(field))
        keys.append(Key(name, allowed, _default(field), field.metadata["meaning"]))
        item = _item_type(hint)
        if dataclasses.is_dataclass(item):
            keys += describe(item, f"{name}.N.")
    return keys


def typed_fields(kind: type) -> list[tuple[dataclasses.Field, Any]]:
    """The fields of a dataclass with their resolved type hints."""
    hints = typing.get_type_hints(kind)
    return [(field, hints[field.name]) for field in dataclasses.fields(kind)]


def fill(kind: type[T], mapping: object, where: str) -> T:
    """Build the dataclass `kind` from a mapping; `where` (a file name) begins each error.

    Raises UserError for a non-mapping, an unknown or missing key, a wrong type, a bad range.
    """
    return _Filler(kind, where).section(kind, mapping, "")


def printable(text: object) -> str:
    """The text on one line of sensible length, with odd characters escaped."""
    line = text if isinstance(text, str) else show(text)
    line = line if line.isprintable() and line.strip() else repr(line)
    return line if len(line) <= 200 else f"{line[:200]}..."


def show(value: object) -> str:
    """A value in YAML's words, on one line and short."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        value = list(value)
    try:
        return _SHORT.repr(value)
    except (ValueError, RecursionError):  # whole numbers of thousands of digits, deep nesting
        return f"a {type(value).__name__} too large to show"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


class _Filler:
    """One filling: the outermost dataclass and where its values came from."""

    def __init__(self, root: type, where: str) -> None:
        self.root = root
        self.where = where

    def fail(self, text: str) -> NoReturn:
        raise UserError(f"{self.where}: {text}")

    def section(self, kind: type[T], mapping: object, prefix: str) -> T:
        """Fill one dataclass whose keys have the dotted prefix."""
        fields = typed_fields(kind)
        known = [field.name for field, _ in fields]
        if not isinstance(mapping, Mapping):
            name = prefix.rstrip(".") or "the configuration"
            keys = ", ".join(known)
            self.fail(f"{name} must be a mapping with keys out of {keys}, not {show(mapping)}")
        for key in mapping:
            if key not in known:
                self.fail(_unknown(self.root, key, known, prefix))
        values = {}
        for field, hint in fields:
            name = f"{prefix}{field.name}"
            if field.name in mapping:
                values[field.name] = self.value(hint, _limits(field), mapping[field.name], name)
            elif field.default is dataclasses.MISSING:
                self.fail(f"{name} is missing; it must be {_allowed(hint, _limits(field))}")
        return kind(**values)

    def value(self, hint: Any, limits: Limits, value: object, name: str) -> Any:
        """Convert one value to its field's type."""
        kinds, nullable = _without_none(hint)
        if value is None and nullable:
            return None
        if dataclasses.is_dataclass(kinds[0]):
            return self.section(kinds[0], value, f"{name}.")
        item = _item_type(hint)
        if item is not None and isinstance(value, (list, tuple)):
            self.check_length(hint, limits, value, name)
            items = enumerate(value)
            return tuple(self.value(item, limits, entry, f"{name}.{i}") for i, entry in items)
        for kind in kinds:
            converted = _converted(kind, limits, value)
            if converted is not None:
                return converted
        advice = _advice(kinds[0], limits, value)
        self.fail(f"{name} must be {_allowed(hint, limits)}, not {show(value)}{advice}")

    def check_length(self, hint: Any, limits: Limits, value: Any, name: str) -> None:
        """Refuse a list with the wrong number of items."""
        wrong = limits.length is not None and len(value) != limits.length
        if wrong or (limits.nonempty and not value):
            self.fail(f"{name} must be {_allowed(hint, limits)}, not {show(value)}")


def _converted(kind: type, limits: Limits, value: object) -> Any:
    """The value as `kind` within its limits, or None if it is not one; lists are no scalars."""
    if kind not in (bool, str, float, int):
        return None
    if kind is bool:
        return value if isinstance(value, bool) else None
    if kind is str:
        return value if isinstance(value, str) and _text_fits(value, limits) else None
    number = _number(value) if kind is float else _whole_number(value)
    return number if number is not None and limits.admits(number) else None


def _text_fits(text: str, limits: Limits) -> bool:
    if limits.choices:
        return text in limits.choices
    if limits.pattern is not None:
        return re.fullmatch(limits.pattern, text) is not None
    return text.isprintable() and bool(text.strip())


def _number(value: object) -> float | None:
    """A finite float. YAML 1.1 reads `1e-3` (no point) as text, so plain numbers in text count."""
    if isinstance(value, str) and PLAIN_NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _whole_number(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > LARGEST_INT:
        return None
    return value


def _advice(kind: Any, limits: Limits, value: object) -> str:
    """What to do about a value that looks right at first sight, else nothing."""
    if kind is float and isinstance(value, float) and not math.isfinite(value):
        return " (it must be finite)"
    no_scalar = value is None or isinstance(value, (str, list, tuple, Mapping))
    if kind is not str or limits.choices or no_scalar:
        return ""
    # YAML made something else of an unquoted text: 123, off, 2024-01-01.
    return f" (YAML reads it as {type(value).__name__}: put it in quotes)"


def _unknown(root: type, key: object, known: list[str], prefix: str) -> str:
    """The message for an unknown key: the nearest known one, or all known ones on this level."""
    name = f"{prefix}{printable(key)}"
    near = difflib.get_close_matches(printable(key), known, n=1)
    if near:
        return f"unknown key {name}: did you mean {prefix}{near[0]}?"
    elsewhere = [k.name for k in describe(root) if k.name.rpartition(".")[2] == key]
    if elsewhere:
        return f"unknown key {name}: did you mean {' or '.join(elsewhere)}?"
    place = f"below {prefix.rstrip('.')}" if prefix else "at the top level"
    return f"unknown key {name}: the keys {place} are {', '.join(known)}"


def _default(field: dataclasses.Field) -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    return field.default if isinstance(field.default, str) else show(field.default)


def _limits(field: dataclasses.Field) -> Limits:
    return field.metadata["limits"]


def _without_none(hint: Any) -> tuple[list[Any], bool]:
    """The alternatives of a type but for None, and whether None is one."""
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return [part for part in parts if part is not types.NoneType], types.NoneType in parts


def _item_type(hint: Any) -> Any:
    """X where tuple[X, ...] is the type or one of its alternatives, else None."""
    kinds, _ = _without_none(hint)
    lists = [kind for kind in kinds if typing.get_origin(kind) is tuple]
    return typing.get_args(lists[0])[0] if lists else None


def _allowed(hint: Any, limits: Limits) -> str:
    """The allowed values in words, e.g. `a number > 0 or null`."""
    kinds, nullable = _without_none(hint)
    words = [_allowed_kind(kind, limits) for kind in kinds] + ["null"] * nullable
    return ", or ".join(words)


def _allowed_kind(kind: Any, limits: Limits) -> str:
    """The allowed values of one of a field's alternatives, in words."""
    item = _item_type(kind)
    if item is not None:
        count = f"{limits.length} " if limits.length else ""
        words = f"a {'non-empty ' if limits.nonempty else ''}list of {count}{_plural(item)}"
        return f"{words} {limits.bounds()}".rstrip()
    if kind is str and limits.choices:
        words = " or ".join((", ".join(limits.choices[:-1]), limits.choices[-1]))
        return words.removeprefix(" or ")
    if kind is str:
        return limits.pattern_meaning or "a non-empty text"
    singular = {bool: "true or false", int: "a whole number", float: "a number"}
    return f"{singular.get(kind, 'a mapping')} {limits.bounds()}".rstrip()


def _plural(item: Any) -> str:
    if dataclasses.is_dataclass(item):
        return f"mappings with keys out of {', '.join(f.name for f in dataclasses.fields(item))}"
    return {int: "whole numbers", float: "numbers", str: "texts"}[item]
