"""Predicts step and epoch times of clusters, with the partitioner that real runs use.

    python simulator.py cluster configs/clusters/two-generations.yaml
    python simulator.py authors --out results/authors/authors.json --check
    python simulator.py scale --out results/scale/scale.json --check
    python simulator.py benchmark results/benchmarks/balance.json --check

`cluster` simulates what a file describes; `authors` predicts the runs of the paper's authors from
their sync-sgd runs, and their unequal AWS pair; `scale` goes from 2 to 4,096 workers of mixed GPU
generations; `benchmark` predicts the runs of benchmarks/balance.py. Each prints a table, writes its
record with `--out`, and with `--check` ends with 1 where a target is missed, naming it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.common import finish, make_folder, table
from configs.errors import UserError
from partitioner import PlanError
from simulation.authors import (
    author_misses,
    author_rows,
    aws_rows,
    part_rows,
    predict_aws,
    predict_runs,
)
from simulation.clusters import (
    cluster_misses,
    cluster_remarks,
    cluster_rows,
    describe_cluster,
    read_cluster,
)
from simulation.reality import compare, read_balance, reality_misses, reality_rows
from simulation.scale import scale_misses, scale_results, scale_rows
from terminal import say


def cluster(options: argparse.Namespace) -> int:
    file, described = read_cluster(options.file)
    results = describe_cluster(file, described)
    table(cluster_rows(results))
    say("\n".join(cluster_remarks(results)))
    return finish("cluster", results, cluster_misses(file, results), options)


def authors(options: argparse.Namespace) -> int:
    runs, pairs = predict_runs(), predict_aws()
    table(author_rows(runs))
    say("\nmeasured less predicted seconds of an epoch, in % of the measured epoch")
    table(part_rows(runs))
    say("\nAWS P2 and P3: dp-sgd predicted from the measured equal split")
    table(aws_rows(pairs))
    return finish("authors", {"runs": runs, "aws": pairs}, author_misses(runs), options)


def scale(options: argparse.Namespace) -> int:
    results = scale_results()
    say("efficiency (T* over step time) in the last epoch")
    table(scale_rows(results))
    return finish("scale", results, scale_misses(results), options)


def benchmark(options: argparse.Namespace) -> int:
    rows = compare(read_balance(options.file))
    table(reality_rows(rows))
    return finish("reality", {"runs": rows}, reality_misses(rows), options)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The chosen command as `run`, `out` (a path or None), `check`, and `file` where it has one."""
    parser = argparse.ArgumentParser(prog="simulator.py", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(run: Callable[[argparse.Namespace], int], meaning: str, file: str | None = None):
        command = commands.add_parser(run.__name__, help=meaning, description=meaning)
        if file is not None:
            command.add_argument("file", type=Path, metavar=file)
        command.add_argument(
            "--out", type=Path, metavar="FILE", help="write the record here (JSON)"
        )
        command.add_argument(
            "--check", action="store_true", help="exit with 1 if a target is missed"
        )
        command.set_defaults(run=run, quick=False)

    add(cluster, "simulate the cluster that a file describes", "FILE.yaml")
    add(authors, "predict the runs of the paper's authors")
    add(scale, "2 to 4,096 workers of mixed GPU generations")
    add(benchmark, "predict the runs of benchmarks/balance.py", "BALANCE.json")
    options = parser.parse_args(given)
    make_folder(parser, options.out)
    return options


def main(given: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 for a missed target under --check, 2 after a one-line error on stderr."""
    options = arguments(given)
    try:
        return options.run(options)
    except (UserError, PlanError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
