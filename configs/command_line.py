"""The command line of trainer.py: options and dotted overrides on top of a YAML file."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import hashlib
import itertools
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TextIO

from configs import files
from configs.errors import UserError
from configs.filling import Key, describe, printable
from configs.schema import Config, from_mapping, resolve
from terminal import say

WHERE = "command line"
DEFAULT_CONFIG = "resnet50-low"
# Options that are another way to write key=value.
SHORTCUTS = {
    "algorithm": "sync-sgd, dp-sgd or edp-sgd",
    "seed": "seed of everything random",
    "output": "folder that receives the run folders",
    "backend": "nccl or gloo",
    "exchange": "ddp, flat, or horovod (under horovodrun)",
    "device": "cpu or cuda",
}
# Keys that do not name a run: they have their own level in the run's path, or change no result.
UNNAMED = (
    "name", "algorithm", "seed", "output", "threads", "timeout",
    "data.cache", "data.loader_workers", "data.memory_limit_gib", "checkpoint.every",
    "checkpoint.keep",
)  # fmt: skip
LONGEST_SUFFIX = 80  # characters in a run's name for the overrides

DESCRIPTION = """\
Train one model on all workers with synchronous data-parallel SGD, with the batch divided by their
speed. Start it with torchrun, e.g.

  torchrun --standalone --nproc_per_node=2 trainer.py --config lenet-high epochs=5
"""


@dataclass(frozen=True)
class Launch:
    """What the command line asked for."""

    config: Config  # resolved
    overrides: tuple[str, ...] = ()  # key=value as given, those that name the run
    resume: str = "auto"  # auto | never
    overwrite: bool = False
    dry_run: bool = False
    local_rank: int | None = None
    local_world_size: int | None = None


class Override(NamedTuple):
    """One key=value of the command line; `text` is the value as it was given."""

    key: str
    text: str
    value: Any


def parse(argv: Sequence[str]) -> Launch:
    """Read the command line (without the program's name): it wins over YAML, YAML over defaults.

    Prints the help and raises SystemExit(0) for --help; raises UserError, one line, for all else
    that is wrong.
    """
    options = _read_options(argv)
    path = files.find(DEFAULT_CONFIG if options.config is None else options.config)
    mapping = files.read_mapping(path)
    config = from_mapping(mapping, printable(str(path)))  # errors of the file name the file
    overrides = _overrides(options)
    if overrides:
        for override in overrides:
            mapping = _replaced(mapping, override.key.split("."), override)
        config = from_mapping(mapping, WHERE)
    named = [f"{key}={text}" for key, text, _ in overrides if key not in UNNAMED]
    return Launch(
        config=resolve(config),
        overrides=tuple(named),
        resume=options.resume or "auto",
        overwrite=options.overwrite,
        dry_run=options.dry_run,
        local_rank=options.local_rank,
        local_world_size=options.local_world_size,
    )


def run_name(launch: Launch) -> str:
    """The run's folder name: the config's name, then + and the overrides in sorted order.

    Values with characters unfit for a folder, and long names, get 8 digits of a hash over the
    overrides, so that different overrides never share a folder.
    """
    if not launch.overrides:
        return launch.config.name
    given = sorted(launch.overrides)
    slugs = [re.sub(r"[^A-Za-z0-9.=_-]", "_", override) for override in given]
    suffix = ",".join(slugs)
    if slugs != given or len(suffix) > LONGEST_SUFFIX:
        digest = hashlib.sha1(json.dumps(given).encode("ascii")).hexdigest()[:8]
        suffix = f"{suffix[: LONGEST_SUFFIX - 9]}-{digest}"
    return f"{launch.config.name}+{suffix}"


def run_folder(launch: Launch) -> Path:
    """Where the run's records go: <output>/<run name>/<algorithm>/seed-<n>."""
    config = launch.config
    return Path(config.output) / run_name(launch) / config.algorithm / f"seed-{config.seed}"


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are UserErrors."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{WHERE}: {' '.join(message.split())}")

    def _print_message(self, message: str, file: TextIO | None = None) -> None:
        say(message.rstrip("\n"))  # the help alone: errors are raised


class _Once(argparse.Action):
    """Stores a value, and refuses an option that is given twice with different values."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) not in (None, values):
            raise argparse.ArgumentError(self, "is given twice with different values")
        setattr(namespace, self.dest, values)


def _build_parser() -> tuple[_Parser, list[str]]:
    """The parser, and the names of all options."""
    parser = _Parser(
        prog="trainer.py",
        description=DESCRIPTION,
        epilog=_keys_help(),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=36, width=100
        ),
        allow_abbrev=False,
    )
    parser.add_argument("assignments", nargs="*", metavar="key=value", help="override one key")
    once = {"action": _Once}
    shipped = ", ".join(files.shipped())
    config_help = f"YAML file, or one of {shipped} (default: {DEFAULT_CONFIG})"
    resume_help = "continue the run's checkpoint where there is one (auto, the default), or never"
    rank_help = "given by torch.distributed.launch; torchrun's environment does it otherwise"
    count = {"type": int, "metavar": "N", "action": _Once}
    actions = [
        parser.add_argument("--config", metavar="FILE", help=config_help, **once),
        *(
            parser.add_argument(f"--{key}", metavar="VALUE", help=f"{key}=VALUE: {text}", **once)
            for key, text in SHORTCUTS.items()
        ),
        parser.add_argument("--resume", choices=("auto", "never"), help=resume_help, **once),
        parser.add_argument(
            "--overwrite", action="store_true",
            help="delete what the run's folder holds; of a torchrun job only its first start does",
        ),
        parser.add_argument(
            "--dry-run", action="store_true", help="check everything, print the plan, train nothing"
        ),
        parser.add_argument("--local_rank", "--local-rank", help=rank_help, **count),
        parser.add_argument("--local_world_size", "--local-world-size", help=rank_help, **count),
    ]
    return parser, ["--help", *(name for action in actions for name in action.option_strings)]


def _read_options(argv: Sequence[str]) -> argparse.Namespace:
    parser, names = _build_parser()
    options, extras = parser.parse_known_intermixed_args(list(argv))
    if extras:
        parser.error(_unknown_option(extras[0], names))
    if options.local_rank is not None and options.local_rank < 0:
        parser.error(f"--local_rank must be a whole number >= 0, not {options.local_rank}")
    if options.local_world_size is not None and options.local_world_size < 1:
        parser.error(
            f"--local_world_size must be a whole number >= 1, not {options.local_world_size}"
        )
    return options


def _unknown_option(text: str, names: list[str]) -> str:
    """The message for an unknown option, with the nearest option or key."""
    option = text.partition("=")[0]
    key = option.lstrip("-").replace("-", "_")
    keys = [entry.name for entry in describe(Config)]
    near = difflib.get_close_matches(option.lower(), names, n=1)
    if key in keys:
        advice = f"keys are given without dashes, {key}=VALUE"
    elif near:
        advice = f"did you mean {near[0]}?"
    else:
        advice = f"the options are {', '.join(names)}, and keys are given as key=value"
    return f"unknown option {printable(option)}: {advice}"


def _overrides(options: argparse.Namespace) -> list[Override]:
    """Options that stand for keys and key=value arguments; each key once, none inside another."""
    found = []
    for key in SHORTCUTS:
        text = getattr(options, key)
        if text is not None:
            value = files.parse(text, f"{WHERE}: --{key}") if key == "seed" else text
            found.append(Override(key, text, value))
    found += [_assignment(text) for text in options.assignments]
    unique = list({(override.key, override.text): override for override in found}.values())
    for a, b in itertools.combinations(unique, 2):
        if a.key == b.key:
            _fail(f"{a.key} is given twice: {printable(a.text)} and {printable(b.text)}; keep one")
        outer, inner = sorted((a.key, b.key), key=len)
        if inner.startswith(f"{outer}."):
            _fail(f"{outer} and {inner} are both given, and the one lies in the other; keep one")
    return unique


def _assignment(argument: str) -> Override:
    """Take key=value apart; the value is YAML."""
    key, equals, text = (part.strip() for part in argument.partition("="))
    if not equals or not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+){0,9}", key):
        hint = f"; a file is given as --config {argument}" if argument in files.shipped() else ""
        _fail(f"{printable(argument)} is not of the form key=value, e.g. optimizer.lr=0.05{hint}")
    inner = [entry.name for entry in describe(Config) if entry.name.startswith(f"{key}.")]
    if inner and key != "stragglers":
        _fail(f"{key} is a section: give its keys one by one, e.g. {inner[0]}=VALUE")
    if not text:
        _fail(f"{key}= has no value; where a key may be empty, write {key}=null")
    return Override(key, text, files.parse(text, f"{WHERE}: {key}"))


def _replaced(value: Any, path: Sequence[str], override: Override) -> Any:
    """A copy of the nested value in which the entry at the path is the override's value."""
    if not path:
        return override.value
    head, rest = path[0], path[1:]
    if isinstance(value, list) or head.isdigit():
        items = value if isinstance(value, list) else []
        if head not in map(str, range(len(items))):
            _fail(
                f"{override.key}: there is no list item {head} ({len(items)} items, from 0 on);"
                " give the whole list, e.g. stragglers=[{ranks: [1], kind: constant, seconds: 0.1}]"
            )
        index = int(head)
        return [*items[:index], _replaced(items[index], rest, override), *items[index + 1 :]]
    section = value if isinstance(value, Mapping) else {}
    return {**section, head: _replaced(section.get(head), rest, override)}


def _keys_help() -> str:
    """All keys by section, each with allowed values, default and meaning, in 100 columns."""
    sections: dict[str, list[Key]] = {}
    for key in describe(Config):
        sections.setdefault(key.name.rpartition(".")[0], []).append(key)
    meanings = {field.name: field.metadata["meaning"] for field in dataclasses.fields(Config)}
    lines = ["keys, in the YAML file (nested) or as key=value (with dots); values are YAML:"]
    for section, keys in sections.items():
        meaning = meanings[section.partition(".")[0]] if section else "The run as a whole."
        lines += ["", f"{section or 'top level'}: {meaning}"]
        for key in keys:
            default = key.default if key.default == "required" else f"default {key.default}"
            lines += _wrapped(f"{key.name}: {key.allowed}; {default}", 2)
            lines += _wrapped(key.meaning, 6)
    return "\n".join(lines)


def _wrapped(text: str, indent: int) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(
        text, 98, initial_indent=margin, subsequent_indent=margin + "    ", break_on_hyphens=False
    )


def _fail(text: str) -> NoReturn:
    raise UserError(f"{WHERE}: {text}")
