"""The HTML report of fake runs: form, escaping, and numbers against computations of their own."""

from __future__ import annotations

import base64
import json
import re
import statistics
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from conftest import ROOT
from fake_runs import write_run
from hypothesis import given, settings
from hypothesis import strategies as st

import reader
from configs.errors import UserError
from plots.comparison import base_variant, comparisons, paper_key, split
from plots.estimates import Ratio
from plots.grouping import Experiment, group
from plots.page import Cell, document, figure, node, notes, table
from plots.predicted import predict
from plots.reference import PaperKey, read_authors, read_pairs, read_predictions
from plots.report import main, make_page

ALGORITHMS = ("sync-sgd", "dp-sgd", "edp-sgd")
FIGURES = (
    "loss-accuracy-epochs", "loss-accuracy-time", "busy-time-histograms", "step-time-densities",
    "phases", "shares-busy-epochs",
)  # fmt: skip
VOID = ("meta", "img", "br", "link", "input", "hr", "source", "base", "col", "embed", "wbr")
# Whatever a browser would fetch by itself.
FETCHED = ("src", "srcset", "data", "poster", "action", "background", "xlink:href")
SMALL = {"epochs": 4, "steps": 12}
SIMULATED = "simulator, from here"
MOVING = [
    {"ranks": [1], "kind": "constant", "seconds": 0.05, "last_epoch": 1},
    {"ranks": [0], "kind": "constant", "seconds": 0.05, "first_epoch": 2},
]
GAMMA = [{"ranks": [1], "kind": "gamma", "shape": 2.0, "scale": 0.025}]
VGG = [{"ranks": [1], "kind": "constant", "seconds": 0.01}]


class Page(HTMLParser):
    """Checks that every tag is closed in order; collects tables, ids, links and text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        values = dict(attrs)
        self.attributes.append((tag, values))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "caption":
            self.rows = self.tables.setdefault(values["id"], [])
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def values(self, name: str) -> list[str]:
        return [found[name] or "" for _, found in self.attributes if name in found]

    def cells(self, name: str) -> list[list[str]]:
        """A table's body with the first cell repeated where it spans rows."""
        width = len(self.tables[name][0])
        filled: list[list[str]] = []
        for row in self.tables[name][1:]:
            filled.append(row if len(row) == width else [filled[-1][0], *row])
        return filled


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seeds of all algorithms, ablations of settings and delays, and one of the paper's."""
    root = tmp_path_factory.mktemp("runs")
    for algorithm in ALGORITHMS:
        for seed in (1, 2, 3):
            write_run(root, algorithm=algorithm, seed=seed, **SMALL)
        write_run(
            root, name="vgg16-low", algorithm=algorithm, model__name="vgg16", batch_size=256,
            data__name="cifar10", stragglers=VGG, **SMALL,
        )  # fmt: skip
    write_run(root, "lenet-low+a", partition__policy="affine", seed=1, **SMALL)
    write_run(root, "lenet-low+b", gradient_weight="uniform", seed=1, **SMALL)
    write_run(root, name="lenet-gamma", stragglers=GAMMA, **SMALL)
    write_run(root, name="lenet-moving", stragglers=MOVING, **SMALL)
    return root


@pytest.fixture(scope="module")
def predictions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As simulator.py authors --out writes them, for one of the paper's experiments."""
    parts = {"evaluation": 3.0, "epoch_rest": 1.0}
    row = {
        "model": "resnet50", "delay_seconds": 0.2, "algorithm": "dp-sgd",
        "predicted_run_seconds": 9600.0, "predicted_speed_up": 1.25,
        "predicted_busy_seconds": [0.3211, 0.3222],
        "predicted_epoch_parts": parts, "optimum_seconds": 0.31987,
    }  # fmt: skip
    pair = {
        "model": "resnet50", "elasticity": 0.8, "predicted_step_seconds": 0.4,
        "predicted_speed_up": 2.8, "predicted_batch_sizes": [40, 216],
        "predicted_busy_seconds": [0.31, 0.32], "optimum_seconds": 0.3,
    }  # fmt: skip
    path = tmp_path_factory.mktemp("predictions") / "authors.json"
    path.write_text(json.dumps({"results": {"runs": [row], "aws": [pair]}}))
    return path


@pytest.fixture(scope="module")
def text(runs: Path, predictions: Path) -> str:
    return make_page([runs], predictions)


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def experiments_of(root: Path) -> list[Experiment]:
    return group([reader.read_run(path) for path in reader.find_runs([root])])[0]


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "epochs.jsonl").read_text().splitlines()]


# --- the page ---------------------------------------------------------------------------------


def test_the_page_stands_alone(text: str, page: Page) -> None:
    assert text.startswith("<!DOCTYPE html>\n<html lang=\"en\">")
    tags = {tag for tag, _ in page.attributes}
    assert not tags & {"script", "link", "iframe", "object", "embed", "base"}
    for name in FETCHED:
        assert all(value.startswith("data:") for value in page.values(name))
    assert all(value.startswith("#") for value in page.values("href"))
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style
    assert not any(name.startswith("on") for _, found in page.attributes for name in found)


def test_links_lead_somewhere_and_names_are_unique(page: Page) -> None:
    names = page.values("id")
    assert len(set(names)) == len(names)
    assert {link[1:] for link in page.values("href")} <= set(names)
    labels = page.values("aria-label")
    assert len(set(labels)) == len(labels) == len(page.tables) + 1


def test_every_table_and_figure_is_there(page: Page) -> None:
    ours = ("experiment-lenet-low", "experiment-vgg16-low")
    others = ("not-run-resnet50-0.1", "not-run-resnet50-0.2", "not-run-vgg16-0.02")
    expected = {f"table-{kind}-{name}" for name in ours + others for kind in ("times", "accuracy")}
    assert set(page.tables) == expected | {
        "table-overview", "table-ablations-lenet-low", "table-ablations-lenet-low-accuracy",
        "table-pairs", "table-runs",
    }  # fmt: skip
    sets = ("lenet-low", "vgg16-low", "ablations-lenet-low", "ablations-lenet-gamma",
            "ablations-lenet-moving")  # fmt: skip
    figures = {f"figure-{name}-{kind}" for name in sets for kind in FIGURES}
    figures |= {f"figure-{name}-time-per-epoch" for name in ("lenet-synthetic", "vgg16-cifar10")}
    found = [values["id"] for tag, values in page.attributes if tag == "figure"]
    assert set(found) == figures and len(found) == len(figures)
    images = [values for tag, values in page.attributes if tag == "img"]
    assert len(images) == len(figures) and all(len(image["alt"] or "") > 30 for image in images)
    for image in images:
        kind, data = (image["src"] or "").split(",")
        assert kind == "data:image/svg+xml;base64"
        root = ElementTree.fromstring(base64.b64decode(data))
        assert root.tag.endswith("svg")


def test_every_row_of_a_table_is_full(page: Page) -> None:
    for name, (head, *_) in page.tables.items():
        assert {len(row) for row in page.cells(name)} == {len(head)}, name


def test_the_same_records_give_the_same_page(runs: Path) -> None:
    assert make_page([runs / "lenet-moving"]) == make_page([runs / "lenet-moving"])


# --- its numbers ------------------------------------------------------------------------------


def test_own_numbers(runs: Path, page: Page) -> None:
    seeds = {
        name: [records(runs / "lenet-low" / name / f"seed-{seed}") for seed in (1, 2, 3)]
        for name in ALGORITHMS
    }
    cells = page.cells("table-times-experiment-lenet-low")
    rows = {row[0]: row for row in cells if row[1] == "here"}
    learned = {row[0]: row for row in page.cells("table-accuracy-experiment-lenet-low")}
    for name, own in seeds.items():
        head = page.tables["table-times-experiment-lenet-low"][0]
        row = dict(zip(head, rows[name]))
        mean = statistics.mean(run[-1]["train_seconds"] for run in own)
        assert row["training alone (s)"].split(" ± ")[0] == f"{mean:.3f}"
        mean = statistics.mean(run[-1]["total_seconds"] for run in own)
        assert row["run with evaluation (s)"].split(" ± ")[0] == f"{mean:.3f}"
        busy = [
            1e3 * statistics.mean(e["busy"]["median"][rank] for run in own for e in run[2:])
            for rank in (0, 1)
        ]
        assert row["balanced busy time per worker (ms)"] == f"{busy[0]:.2f} / {busy[1]:.2f}"
        if name == "sync-sgd":
            assert row["speed-up of training [95\u00a0%]"] == "reference" and row["T* (ms)"] == ""
            continue
        logs = [
            over[-1]["train_seconds"] / under[-1]["train_seconds"]
            for over, under in zip(seeds["sync-sgd"], own)
        ]
        speed_up, interval = row["speed-up of training [95\u00a0%]"].split("× ")
        assert speed_up == f"{statistics.geometric_mean(logs):.2f}"
        assert interval.startswith("[") and "(n" not in interval
        assert row["T* (ms)"] == f"{1e3 * statistics.mean(r[-1]['optimum'] for r in own):.2f}"
        final = [100 * run[-1]["test_top1"] for run in own]
        best = [100 * max(epoch["test_top1"] for epoch in run) for run in own]
        for cell, values in zip(learned[name][4:6], (final, best)):
            mean, sd = statistics.mean(values), statistics.stdev(values)
            assert cell == f"{mean:.2f} ± {sd:.2f} (n = 3)"


def test_one_seed_shows_neither_deviation_nor_interval(page: Page) -> None:
    for row in page.cells("table-times-experiment-vgg16-low"):
        if row[1] in ("here", SIMULATED):
            assert not any("±" in cell or "[" in cell for cell in row)
    for row in page.cells("table-accuracy-experiment-vgg16-low"):
        assert "± " not in "".join(row) and "(n = 1)" in row[4]


def test_authors_and_predictions_stand_beside_empty_cells(page: Page) -> None:
    rows = page.cells("table-times-not-run-resnet50-0.2")
    assert [row[:2] for row in rows] == [
        [name, source]
        for name in ALGORITHMS
        for source in ("here", "authors", "simulator, from authors")
    ]
    by_name = {tuple(row[:2]): row[2:] for row in rows}
    for name in ALGORITHMS:
        assert set(by_name[name, "here"]) == {""}
    assert set(by_name["sync-sgd", "simulator, from authors"]) == {""}
    dp = by_name["dp-sgd", "authors"]
    assert dp[:2] == ["5", "150"] and dp[4] == "11728.3 ± 9.8" and dp[5] == "324.56 / 324.48"
    assert dp[2] == f"{196 * 0.37738:.2f}" and dp[7] == f"{0.47418 / 0.37738:.2f}×"
    assert dp[8].startswith(f"{14791.5 / 11728.3:.2f}× [")
    predicted = by_name["dp-sgd", "simulator, from authors"]
    assert predicted == [
        "", "150", "60.00", "9000.0", "9600.0", "321.10 / 322.20", "319.87",
        f"{(1.25 * 9600 / 150 - 4) / 60:.2f}×", "1.25×",
    ]  # fmt: skip
    accuracy = page.cells("table-accuracy-not-run-resnet50-0.2")
    assert [row[1:-1] for row in accuracy] == [[""] * 6] * 3
    assert [row[-1] for row in accuracy] == ["0.0018", "0.0026", "0.0023"]


def test_without_predictions_their_cells_are_empty(runs: Path, tmp_path: Path) -> None:
    page = Page(make_page([runs / "vgg16-low"]))
    for row in page.cells("table-times-experiment-vgg16-low"):
        empty = row[1] == "simulator, from authors" or row[:2] == ["sync-sgd", SIMULATED]
        assert (set(row[2:]) == {""}) == empty
    first = page.cells("table-pairs")[1]
    assert first == ["resnet50", "simulator, from authors", "dp-sgd", *[""] * 6]


def test_own_predictions_rest_on_sync_sgd_alone(tmp_path: Path) -> None:
    """The fake workers' costs are known, so are the times that the simulator should find."""
    for seed in (1, 2):
        for algorithm in ALGORITHMS:
            write_run(tmp_path, algorithm=algorithm, seed=seed, epochs=4, data__train_samples=2560)
    (experiment,) = experiments_of(tmp_path)
    told = predict(experiment)
    assert list(told) == ["dp-sgd", "edp-sgd"]
    dp = told["dp-sgd"]
    # fake_runs.py: about 2 ms a sample, 4 ms a step, and the delay.
    slope, fixed, delay = 2e-3 * np.random.default_rng(2).uniform(0.9, 1.2, 2), 0.004, 0.05
    equal = (32 * slope + fixed)[1] + delay
    best = (64 + (2 * fixed + delay) / slope.mean()) / (1 / slope).sum()
    assert equal > 1.1 * best
    assert dp.optimum == pytest.approx(best, rel=0.05)
    assert dp.busy_seconds == pytest.approx([best, best], rel=0.05)
    # 40 steps, of which three are far longer, and what jitter adds.
    assert 40 * best < dp.epoch_seconds.mean < 40 * 1.7 * best
    assert 1.02 < dp.train_speed_up.value < equal / best
    assert dp.total_seconds.mean == pytest.approx(dp.train_seconds.mean + 4 * 0.4)
    for path in tmp_path.glob("lenet-low/*dp-sgd/*/epochs.jsonl"):
        path.write_text(path.read_text().replace('"epoch_seconds": ', '"epoch_seconds": 9'))
    assert predict(*experiments_of(tmp_path)) == told


def test_experiments_that_nothing_can_be_predicted_for(tmp_path: Path) -> None:
    write_run(tmp_path, "without", algorithm="dp-sgd", **SMALL)
    assert predict(*experiments_of(tmp_path)) == {}
    for algorithm in ("sync-sgd", "dp-sgd"):
        write_run(tmp_path, "lacking", algorithm=algorithm, **SMALL)
    for path in tmp_path.glob("lacking/sync-sgd/*/epochs.jsonl"):
        path.write_text(re.sub(r'"steps": \d+', '"steps": 0', path.read_text()))
    page = Page(make_page([tmp_path / "lacking"]))
    assert "nothing is predicted" in page.text


def test_the_authors_unequal_instances(predictions: Path, page: Page) -> None:
    assert page.cells("table-pairs") == [
        ["resnet50", "authors", "sync-sgd", "", "128 / 128", "1000.20 / 192.60", "1116.80", "",
         "reference"],
        ["resnet50", "simulator, from authors", "dp-sgd", "80%", "40 / 216", "310.00 / 320.00",
         "400.00", "300.00", "2.80×"],
        ["vgg16", "authors", "sync-sgd", "", "128 / 128", "156.30 / 121.20", "372.70", "",
         "reference"],
        ["vgg16", "simulator, from authors", "dp-sgd", *[""] * 6],
    ]  # fmt: skip
    assert [len(pair.predicted) for pair in read_pairs(predictions)] == [1, 0]


def test_ablations_stand_under_their_base(page: Page) -> None:
    rows = page.cells("table-ablations-lenet-low")
    assert [row[0] for row in rows] == [
        "edp-sgd – base", "edp-sgd (affine)", "edp-sgd (uniform weight)", "edp-sgd", "edp-sgd",
    ]  # fmt: skip
    assert rows[3][1].startswith("gamma") or rows[4][1].startswith("gamma")
    assert rows[0][8] == "reference" and rows[0][2] == "3"
    # Both hold seed 1; the base's other seeds have no partner.
    assert rows[1][8].endswith("×") and rows[1][9].endswith("×")
    # sync-sgd was not run under these delays, nor the base with these runs' seed.
    assert rows[3][9] == rows[4][9] == ""
    learned = page.cells("table-ablations-lenet-low-accuracy")
    assert [row[:4] for row in learned] == [row[:4] for row in rows]
    assert "±" in learned[0][5] and not any("±" in cell for cell in learned[1])


# --- which numbers belong together ------------------------------------------------------------


def test_delays_of_another_kind_are_ablations_of_the_nearest_steady_one(tmp_path: Path) -> None:
    for name, delay in (("near", 0.06), ("far", 0.4)):
        rules = [{"ranks": [1], "kind": "constant", "seconds": delay}]
        write_run(tmp_path, name=name, stragglers=rules, **SMALL)
    write_run(tmp_path, name="random", stragglers=GAMMA, **SMALL)
    write_run(tmp_path, name="lonely", stragglers=GAMMA, precision="bf16", **SMALL)
    experiments = experiments_of(tmp_path)
    main_ones, tables = split(experiments)
    assert {experiment.slug for experiment in main_ones} == {"near", "far", "lonely"}
    assert list(tables) == ["near"]
    assert [line.experiment.slug for line in tables["near"]] == ["near", "random"]
    assert [line.is_base for line in tables["near"]] == [True, False]


def test_the_base_is_the_variant_nearest_to_the_defaults(tmp_path: Path) -> None:
    write_run(tmp_path, "a", partition__every=7, **SMALL)
    write_run(tmp_path, "b", **SMALL)
    write_run(tmp_path, "c", partition__policy="affine", **SMALL)
    (experiment,) = experiments_of(tmp_path)
    assert base_variant(experiment, "edp-sgd").label == "edp-sgd (every epoch)"
    assert base_variant(experiment, "dp-sgd") is None


@pytest.mark.parametrize(
    ("changes", "workers", "found"),
    [
        ({}, 2, PaperKey("vgg16", 0.01)),
        ({"batch_size": 128}, 2, None),
        ({"model__name": "resnet50"}, 2, None),
        ({"data__subset": 1000}, 2, None),
        ({"data__name": "synthetic"}, 2, None),
        ({"stragglers": [*VGG, *VGG]}, 2, None),
        ({"stragglers": [{**VGG[0], "ranks": [0]}]}, 2, None),
        ({"stragglers": [{**VGG[0], "last_epoch": 3}]}, 2, None),
        ({"stragglers": []}, 2, None),
        ({"precision": "bf16"}, 2, None),
        ({"accumulate": 2}, 2, None),
        ({}, 3, None),
    ],
)
def test_only_the_papers_own_set_up_stands_beside_its_numbers(
    tmp_path: Path, changes: dict, workers: int, found: PaperKey | None
) -> None:
    same = {"model__name": "vgg16", "data__name": "cifar10", "batch_size": 256, "stragglers": VGG}
    write_run(tmp_path, workers=workers, **{**same, **SMALL, **changes})
    known = list(read_authors())
    (experiment,) = experiments_of(tmp_path)
    assert paper_key(experiment, known) == found
    missing = [one.paper for one in comparisons([experiment], known) if one.own is None]
    assert missing == [key for key in known if key != found]


def test_the_authors_slow_machine_state_is_pointed_out(page: Page) -> None:
    assert page.text.count("slower machine state") == 1
    row = read_authors()[PaperKey("resnet50", 0.1)]["dp-sgd"].times
    assert row.total_speed_up == Ratio(
        pytest.approx(12921.6 / 9976.2), pytest.approx((1.2931, 1.2973), abs=5e-4), 5, False
    )


# --- escaping ---------------------------------------------------------------------------------

hostile = st.text(st.characters(), max_size=40) | st.sampled_from(
    ["</td><script>alert(1)</script>", "\" onload=\"x", "&amp;&lt;", "\x00\ud800\x1f]]>", "<!--"]
)


@given(hostile, hostile, hostile)
@settings(deadline=None, max_examples=150)
def test_no_text_becomes_markup(one: str, two: str, three: str) -> None:
    def shown(text: str) -> str:
        kept = [c if c.isprintable() or c in "\t\n" or ord(c) > 0x9F else "?" for c in text]
        return "".join(kept)

    content = [
        node("h1", one), node("p", two, title=three), notes([three]),
        table(one, three, [two], [[Cell(three, heading=True)]], "name"),
        figure(b"<svg/>", two, "figure"), node("details", node("summary", one), node("pre", two)),
    ]  # fmt: skip
    text = document(one, content)
    text.encode("utf-8")
    parsed = Page(text)
    assert [tag for tag, _ in parsed.attributes].count("h1") == 1
    tags = {tag for tag, _ in parsed.attributes}
    assert tags <= {
        "html", "head", "meta", "title", "style", "body", "main", "h1", "p", "ul", "li", "div",
        "table", "caption", "thead", "tbody", "tr", "th", "td", "figure", "img", "figcaption",
        "details", "summary", "pre",
    }  # fmt: skip
    names = {name for _, found in parsed.attributes for name in found}
    assert names <= {
        "charset", "name", "content", "lang", "title", "class", "scope", "id", "role", "tabindex",
        "aria-label", "src", "alt",
    }  # fmt: skip
    printable = "".join(c for c in two if c.isprintable())
    if printable == two and two:
        assert two in parsed.text and two in parsed.values("alt")


def test_texts_of_configs_are_escaped(tmp_path: Path) -> None:
    evil = "<img src=http://example.org onerror=alert(1)>"
    write_run(tmp_path, model__name=evil, data__root=evil, partition__policy="replay",
              partition__replay=evil, **SMALL)  # fmt: skip
    text = make_page([tmp_path])
    page = Page(text)
    assert evil not in text and evil in page.text
    assert all(value.startswith("data:") for value in page.values("src"))
    assert not page.values("onerror")


# --- errors -----------------------------------------------------------------------------------


def failing(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize(
    "content",
    ["", "[]", "3", "{}", '{"results": {}}', '{"results": {"aws": []}}',
     '{"results": {"runs": [{"model": "vgg16"}], "aws": []}}',
     '{"results": {"aws": [], "runs": [{"model": "alexnet", "delay_seconds": 1, '
     '"algorithm": "dp-sgd"}]}}',
     '{"results": {"runs": 7, "aws": []}}',
     '{"results": {"runs": [{"model": [], "delay_seconds": {}}], "aws": []}}',
     '{"results": {"runs": [], "aws": [{"model": "alexnet"}]}}',
     '{"results": {"runs": [], "aws": [{"model": "vgg16", "elasticity": []}]}}',
     '{"results": {"runs": [], "aws": 7}}'],
)  # fmt: skip
def test_damaged_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (tmp_path / "authors.json").write_text(content)
    arguments = ("--predictions", tmp_path / "authors.json", "--out", tmp_path / "report.html")
    line = failing(capsys, tmp_path, *arguments)
    assert str(tmp_path / "authors.json") in line and "simulator.py authors --out" in line


@pytest.mark.parametrize(
    "name, key, value",
    [
        ("provenance.json", "world_size", "2"), ("provenance.json", "world_size", [2]),
        ("provenance.json", "devices", 3), ("provenance.json", "versions", []),
        ("provenance.json", "calibrated_delays", [3]),
        ("provenance.json", "calibrated_delays", [{"rule": 0, "rank": 1, "seconds": "1"}]),
        ("epochs.jsonl", "shares", 2), ("epochs.jsonl", "busy", 2), ("epochs.jsonl", "busy", {}),
        ("epochs.jsonl", "train_loss", [1.0, 2.0]), ("epochs.jsonl", "test_top1", "high"),
        ("epochs.jsonl", "train_seconds", 0.0), ("epochs.jsonl", "total_seconds", None),
        ("epochs.jsonl", "phases", {"delay": [1.0]}), ("epochs.jsonl", "total_seconds", {}),
    ],
)  # fmt: skip
def test_records_of_other_kinds_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, key: str, value: object
) -> None:
    write_run(tmp_path, algorithm="sync-sgd", epochs=2, steps=6)
    path = write_run(tmp_path, epochs=2, steps=6) / name
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, key: value}) + "\n" for line in lines))
    line = failing(capsys, tmp_path, "--out", tmp_path / "report.html")
    assert str(path) in line and not (tmp_path / "report.html").exists()
    assert key in line or "time" in line


def test_planned_runs_that_are_not_there_are_named(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", epochs=1, steps=5)
    out = tmp_path / "report.html"
    arguments = ["--missing", "lenet-high/dp-sgd/seed-1", "--missing", "<b>"]
    assert main([str(tmp_path / "runs"), "--out", str(out), *arguments]) == 0
    page = Page(out.read_text())
    assert "2 planned runs not finished" in page.text
    for name in ("lenet-high/dp-sgd/seed-1", "<b>"):
        assert f"Planned, but not finished: {name}" in page.text


def test_missing_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    assert str(tmp_path) in failing(capsys, tmp_path, "--out", page)
    line = failing(capsys, tmp_path, "--out", page, "--predictions", tmp_path / "none.json")
    assert "none.json" in line and not page.exists()


def test_an_output_that_is_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs", epochs=1, steps=5)
    assert str(tmp_path) in failing(capsys, tmp_path / "runs", "--out", tmp_path)


def test_damaged_numbers_of_the_authors(tmp_path: Path) -> None:
    whole = (ROOT / "data" / "reference" / "authors_runs.csv").read_text()
    path = tmp_path / "authors.csv"
    for content in (whole.replace("run_seconds_mean", "x"), whole.replace("12921.6", "fast")):
        path.write_text(content)
        with pytest.raises(UserError, match="authors.csv"):
            read_authors(path)
    with pytest.raises(UserError, match="none.csv"):
        read_authors(tmp_path / "none.csv")


def test_predictions_are_read_with_their_parts(predictions: Path) -> None:
    found = read_predictions(predictions, read_authors())
    assert list(found) == [PaperKey("resnet50", 0.2)] and list(found.popitem()[1]) == ["dp-sgd"]
