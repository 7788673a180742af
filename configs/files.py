"""Finding and reading YAML files, safely and strictly."""

from __future__ import annotations

import difflib
import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from configs.errors import UserError
from configs.filling import printable

FOLDER = Path(__file__).resolve().parent


def shipped() -> list[str]:
    """The names of the configurations that ship with the project, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find(name: str) -> Path:
    """The file called `name`, or else the shipped configuration of that name (`lenet-low`).

    Raises UserError that lists the shipped configurations if there is neither.
    """
    if os.path.isfile(name):
        return Path(name)
    stem = name.removesuffix(".yaml")
    if stem in shipped():
        return FOLDER / f"{stem}.yaml"
    near = difflib.get_close_matches(Path(stem).name, shipped(), n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(
        f"no configuration file {printable(name)}: {hint}"
        f"give a path or one of {', '.join(shipped())}"
    )


def read_mapping(path: str | Path) -> dict[Any, Any]:
    """The mapping in a YAML file.

    Raises UserError for a file that cannot be read, is not YAML or holds no mapping.
    """
    where = printable(str(path))
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{where}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: is not UTF-8 text (byte {error.start})") from error
    value = parse(text, where)
    if not isinstance(value, dict):
        raise UserError(f"{where}: must hold a mapping of keys to values, e.g. name: my-run")
    return value


def parse(text: str, where: str) -> Any:
    """The value of a YAML text; keys given twice are refused.

    Raises UserError, beginning with `where`, that names the line.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"{where}: line {line}: a character that YAML does not allow") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(str(error.problem or error.context).split())
        raise UserError(f"{where}: line {mark.line + 1}: {printable(problem)}") from error
    except RecursionError as error:
        raise UserError(f"{where}: is nested too deeply") from error


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice in one mapping (PyYAML takes the last)."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # PyYAML lets these slip for impossible dates, overlong numbers, wrongly tagged values.
            kind = node.tag.rpartition(":")[2]
            problem = f"a value that cannot be read as {kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            # `<<` merges another mapping, whose keys may be given again.
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # SafeLoader's own error follows
            if key in seen:
                problem = f"key {printable(key)} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)
