"""Finding and reading YAML, JSON and other files strictly: they may come from anyone."""

from __future__ import annotations

import difflib
import json
import math
import os
import stat
import zipfile
from collections.abc import Hashable
from pathlib import Path
from typing import Any, NoReturn

import yaml

from configs.errors import UserError
from configs.filling import printable

FOLDER = Path(__file__).resolve().parent
YAML_BYTES = 2**17  # PyYAML takes seconds for more
JSON_BYTES = 2**30  # the records of a long run of thousands of workers
# A few lines of YAML can stand for billions of values: aliases of lists of aliases, and so on.
MOST_VALUES, DEEPEST = 100_000, 100


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
    value = parse(read_text(path, YAML_BYTES), where)
    if not isinstance(value, dict):
        raise UserError(f"{where}: must hold a mapping of keys to values, e.g. name: my-run")
    return value


def read_text(path: str | Path, most: int) -> str:
    """The text of a regular file of at most `most` bytes.

    Raises UserError for any other file: a pipe or a device might never end.
    """
    where = printable(str(path))
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UserError(f"{where}: cannot be read: not a regular file")
        with open(path, "rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise UserError(f"{where}: cannot be read: {error.strerror}") from error
    if len(content) > most:
        raise UserError(f"{where}: is larger than the {most:,} bytes that are read of such a file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: is not UTF-8 text (byte {error.start})") from error


def read_json(path: str | Path) -> Any:
    """The value in a JSON file. Raises UserError for a file that cannot be read or is not JSON."""
    return parse_json(read_text(path, JSON_BYTES), printable(str(path)))


def parse_json(text: str, where: str) -> Any:
    """The value of a JSON text, strictly: NaN, Infinity and numbers beyond a float's are refused.

    Raises UserError, beginning with `where`.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError as error:
        raise UserError(f"{where}: is not JSON: nested too deeply") from error
    except ValueError as error:
        reason = printable(" ".join(str(error).split()))
        raise UserError(f"{where}: is not JSON: {reason}") from error


def refuse_compressed(archive: zipfile.ZipFile) -> None:
    """Raises ValueError for a ZIP file (NPZ, checkpoint) with a compressed part.

    None of ours is compressed, so that a small file cannot unfold to fill the memory.
    """
    for member in archive.infolist():
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{printable(member.filename)} is compressed, which none of ours is")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large")
    return number


def parse(text: str, where: str) -> Any:
    """The value of a YAML text; keys given twice and aliases that multiply are refused.

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
    """SafeLoader that refuses a key given twice in one mapping (PyYAML takes the last).

    It also refuses more than MOST_VALUES values, each counted as often as its aliases name it.
    """

    def get_single_node(self) -> yaml.Node | None:
        root = super().get_single_node()
        if root is not None:
            _measure(root, {})
        return root

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


def _measure(node: yaml.Node, known: dict[yaml.Node, tuple[int, int] | None]) -> tuple[int, int]:
    """How many values a node stands for, all aliases written out, and how deep they are nested.

    known: of the nodes seen before, None for those around this one. Raises ComposerError.
    """
    if node in known:
        if (measured := known[node]) is None:
            _refuse(node, "an alias inside of what it stands for")
        return measured
    known[node] = None
    count = depth = 1
    parts = node.value if isinstance(node, yaml.CollectionNode) else ()
    for part in parts:
        for inner in part if isinstance(part, tuple) else (part,):
            more, deeper = _measure(inner, known)
            count, depth = count + more, max(depth, deeper + 1)
    if count > MOST_VALUES:
        _refuse(node, f"more than {MOST_VALUES:,} values with all aliases written out")
    if depth > DEEPEST:
        _refuse(node, "nested too deeply")
    known[node] = count, depth
    return count, depth


def _refuse(node: yaml.Node, problem: str) -> NoReturn:
    raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
