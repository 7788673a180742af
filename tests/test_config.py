"""The configuration: what is accepted, what is refused and how, and the command line."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import files
from configs.command_line import Launch, parse, run_name
from configs.errors import UserError
from configs.schema import (
    Config,
    PartitionConfig,
    StragglerRule,
    check_workers,
    differences,
    for_workers,
    from_mapping,
    resolve,
    to_mapping,
)
from schedule import learning_rate

ROOT = Path(__file__).resolve().parent.parent

# Every key, written down by hand as the README documents them.
KEYS = """
name algorithm epochs batch_size batch_per_worker accumulate label_smoothing seed gradient_weight
stragglers exchange precision memory_format
evaluation_batch_size backend device threads timeout output model.name data.name data.root
data.cache data.subset data.test_subset data.image_size data.mean data.std data.crop_padding
data.crop data.test_resize
data.flip data.placement data.memory_limit_gib data.loader_workers data.train_samples
data.test_samples optimizer.lr optimizer.momentum optimizer.nesterov optimizer.weight_decay
schedule.kind schedule.milestones schedule.factor schedule.scale_lr schedule.reference_batch_size
schedule.warmup_epochs partition.policy partition.shares partition.every partition.min_batch
partition.max_batch partition.min_gain partition.replay checkpoint.every checkpoint.keep
stragglers.N.ranks stragglers.N.kind stragglers.N.seconds
stragglers.N.fraction stragglers.N.busy_seconds stragglers.N.shape stragglers.N.scale
stragglers.N.factor stragglers.N.first_epoch stragglers.N.last_epoch
""".split()

DEFAULTS = """
algorithm: edp-sgd
epochs: 150
batch_size: 256
batch_per_worker: null
accumulate: 1
label_smoothing: 0.0
seed: 42
model: {name: resnet50}
data: {name: cifar10, root: data, cache: data/cache, subset: null, test_subset: null,
       image_size: null, mean: null, std: null, crop: pad, crop_padding: 4, flip: true,
       test_resize: null, placement: auto,
       memory_limit_gib: 4.0, loader_workers: 2, train_samples: 4096, test_samples: 1024}
optimizer: {lr: 0.1, momentum: 0.9, nesterov: true, weight_decay: 0.0005}
schedule: {kind: cosine, milestones: null, factor: 0.1, scale_lr: none, reference_batch_size: 256,
  warmup_epochs: 0.0}
partition: {policy: null, shares: null, every: epoch, min_batch: 2, max_batch: null,
  min_gain: 0.01, replay: null}
gradient_weight: null
stragglers: []
checkpoint: {every: epoch, keep: 2}
exchange: ddp
precision: fp32
memory_format: contiguous
evaluation_batch_size: 500
backend: null
device: null
threads: null
timeout: 600.0
output: runs
"""


def read(text: str) -> Config:
    """The configuration in a YAML text, to which a name is added."""
    return from_mapping({"name": "x", **(files.parse(text, "FILE") or {})}, where="FILE")


def refusal(function, *arguments) -> str:
    """The message of the UserError that a call raises; it must be one printable line."""
    with pytest.raises(UserError) as raised:
        function(*arguments)
    message = str(raised.value)
    assert message.isprintable(), message
    return message


def test_defaults():
    assert to_mapping(read("")) == {"name": "x", **yaml.safe_load(DEFAULTS)}


def test_configurations_are_frozen_and_lists_become_tuples():
    config = read("{data: {mean: [0, 0.5, 1e-1]}, stragglers: [{ranks: [1, 0], kind: gamma,"
                  " shape: 2, scale: 0.1}]}")
    assert config.data.mean == (0.0, 0.5, 0.1)
    assert config.stragglers == (
        StragglerRule(ranks=(1, 0), kind="gamma", shape=2.0, scale=0.1),
    )
    hash(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.epochs = 3


@pytest.mark.parametrize(
    "text, value", [("1e-3", 0.001), ("1", 1.0), (".5", 0.5), ("'0.25'", 0.25), ("2.5E+2", 250.0)]
)
def test_numbers_as_people_write_them(text, value):
    lr = read(f"optimizer: {{lr: {text}}}").optimizer.lr
    assert lr == value and type(lr) is float


RULE = "stragglers: [{ranks: [1], kind: "
BAD = [
    # text, what the message must contain
    ("optimizer: {lrr: 1}", ["optimizer.lrr", "did you mean optimizer.lr?"]),
    ("epoch: 1", ["epoch", "did you mean epochs?"]),
    ("lr: 1", ["lr", "did you mean optimizer.lr?"]),
    ("qqqq: 1", ["qqqq", "batch_size", "stragglers"]),
    ("schedule: {zzz: 1}", ["schedule.zzz", "the keys below schedule are kind"]),
    ("1: 2", ["unknown key 1"]),
    ("null: 2", ["unknown key null"]),
    ('"a\\nb": 2', [r"'a\nb'"]),
    (RULE + "constant, second: 1}]", ["stragglers.0.second", "did you mean stragglers.0.seconds?"]),
    ("algorithm: sgd", ["algorithm", "sync-sgd, dp-sgd or edp-sgd", "'sgd'"]),
    ("epochs: 0", ["epochs", "a whole number >= 1", "not 0"]),
    ("epochs: 2.0", ["epochs", "whole number", "2.0"]),
    ("epochs: 1e3", ["epochs", "whole number", "'1e3'"]),
    ("epochs: true", ["epochs", "whole number", "true"]),
    ("epochs: null", ["epochs", "not null"]),
    ("epochs: 99999999999999999999", ["epochs", "whole number"]),
    ("seed: -1", ["seed", ">= 0"]),
    ("seed: 4294967296", ["seed", "<= 4294967295"]),
    ("optimizer: {lr: true}", ["optimizer.lr", "a number > 0", "true"]),
    ("optimizer: {lr: .nan}", ["optimizer.lr", "nan"]),
    ("optimizer: {lr: nan}", ["optimizer.lr", "nan"]),
    ("optimizer: {lr: .inf}", ["optimizer.lr", "inf", "finite"]),
    ("optimizer: {lr: 1e999}", ["optimizer.lr", "1e999"]),
    ("optimizer: {lr: '0.1 '}", ["optimizer.lr", "'0.1 '"]),
    ("optimizer: {lr: [0.1]}", ["optimizer.lr", "[0.1]"]),
    ("optimizer: {lr: 0}", ["optimizer.lr", "> 0"]),
    ("optimizer: {momentum: 1}", ["optimizer.momentum", ">= 0 and < 1"]),
    ("optimizer: {nesterov: 1}", ["optimizer.nesterov", "true or false"]),
    ("optimizer: {momentum: 0}", ["optimizer.nesterov", "optimizer.momentum > 0"]),
    ("optimizer: 3", ["optimizer", "a mapping", "not 3"]),
    ("optimizer:", ["optimizer", "a mapping", "null"]),
    ("output: 12", ["output", "text", "in quotes"]),
    ("output: off", ["output", "text", "in quotes"]),
    ("output: 2024-01-01", ["output", "text", "in quotes"]),
    ("output: ' '", ["output", "non-empty"]),
    ("model: {name: ''}", ["model.name", "non-empty"]),
    ('output: "a\\nb"', ["output"]),
    ("data: {subset: 0}", ["data.subset", ">= 1, or null"]),
    ("data: {mean: [1, 2]}", ["data.mean", "a list of 3 numbers, or null"]),
    ("data: {mean: 0.5}", ["data.mean", "a list of 3 numbers"]),
    ("data: {std: [1, 0, 1]}", ["data.std.1", "> 0", "not 0"]),
    ("data: {image_size: [32, 32]}", ["data.image_size", "whole number"]),
    ("data: {placement: ram}", ["data.placement", "auto, memory or loader"]),
    ("data: {loader_workers: -1}", ["data.loader_workers", ">= 0"]),
    ("partition: {every: 0}", ["partition.every", "epoch", "whole number >= 1"]),
    ("partition: {every: step}", ["partition.every", "epoch", "whole number >= 1"]),
    ("partition: {every: true}", ["partition.every"]),
    ("checkpoint: {every: 0}", ["checkpoint.every", "epoch or N epochs", "whole number >= 1"]),
    ("checkpoint: {every: 0 epochs}", ["checkpoint.every", "epoch or N epochs"]),
    ("checkpoint: {keep: 0}", ["checkpoint.keep", "whole number >= 1"]),
    ("partition: {max_batch: [8, 0]}", ["partition.max_batch.1"]),
    ("partition: {max_batch: []}", ["partition.max_batch", "non-empty list"]),
    ("partition: {min_gain: 1}", ["partition.min_gain", "< 1"]),
    ("partition: {policy: replay}", ["partition.replay"]),
    ("partition: {policy: affine, replay: runs/x}", ["partition.replay"]),
    ("partition: {policy: static}", ["partition.policy", "partition.shares"]),
    ("partition: {policy: equal, shares: [1, 1]}", ["partition.shares", "static", "equal"]),
    ("partition: {shares: []}", ["partition.shares", "non-empty list"]),
    ("partition: {shares: [1, 0]}", ["partition.shares.1", "> 0"]),
    ("partition: {shares: [-1, 1]}", ["partition.shares.0", "> 0"]),
    ("partition: {shares: [1e-300, 1e300]}", ["partition.shares.0", "too small"]),
    ("partition: {min_batch: 9, max_batch: 8}", ["partition.min_batch 9", "partition.max_batch 8"]),
    ("timeout: 0", ["timeout", "> 0"]),
    ("timeout: 1e18", ["timeout", "<= 604800"]),
    ("threads: 1000000", ["threads", "<= 1024"]),
    ("epochs: 1000000000000", ["epochs", "<= 100000"]),
    ("batch_size: 4611686018427387904", ["batch_size", "<= 2147483647"]),
    ("partition: {max_batch: [4611686018427387904, 1]}", ["partition.max_batch.0", "<="]),
    ("data: {crop_padding: 200}", ["data.crop_padding", ">= 0 and <= 127"]),
    ("data: {loader_workers: 100000}", ["data.loader_workers", "<= 256"]),
    ("data: {train_samples: 1000000000000}", ["data.train_samples", "<= 1000000"]),
    ("data: {image_size: 1000000}", ["data.image_size", "<= 4096"]),
    (RULE + "slowdown, factor: 1e300}]", ["stragglers.0.factor", "<= 10000"]),
    (RULE + "gamma, shape: 1e9, scale: 1}]", ["stragglers.0", "1e+09 s on average", "timeout"]),
    (RULE + "exponential, scale: 600}]", ["stragglers.0", "600 s on average", "timeout 600"]),
    ("backend: nccl\ndevice: cpu", ["backend", "device"]),
    ("stragglers: {ranks: [1]}", ["stragglers", "a list of mappings"]),
    ("stragglers: [1]", ["stragglers.0", "a mapping"]),
    ("stragglers: [{kind: gamma}]", ["stragglers.0.ranks", "missing"]),
    ("stragglers: [{ranks: [1]}]", ["stragglers.0.kind", "missing", "constant"]),
    (RULE + "constant}]", ["stragglers.0", "exactly one of", "neither"]),
    (RULE + "constant, seconds: 1, fraction: 1}]", ["stragglers.0", "exactly one of", "both"]),
    (RULE + "constant, seconds: 1, busy_seconds: [1]}]", ["busy_seconds needs", "fraction"]),
    (RULE + "constant, fraction: 1, busy_seconds: [1, 1]}]", ["busy_seconds has 2", "ranks 1"]),
    (RULE + "constant, fraction: 1, busy_seconds: [0]}]", ["stragglers.0.busy_seconds", "> 0"]),
    (RULE + "gamma, shape: 1, scale: 1, busy_seconds: [1]}]", ["busy_seconds needs", "fraction"]),
    (RULE + "constant, seconds: -1}]", ["stragglers.0.seconds", ">= 0"]),
    (RULE + "constant, seconds: 600}]", ["stragglers.0.seconds 600", "timeout 600"]),
    (RULE + "constant, seconds: 1, scale: 1}]", ["stragglers.0.scale", "seconds or fraction"]),
    (RULE + "gamma, shape: 1}]", ["stragglers.0.scale", "shape and scale"]),
    (RULE + "gamma, shape: 0, scale: 1}]", ["stragglers.0.shape", "> 0"]),
    (RULE + "exponential}]", ["stragglers.0.scale", "missing"]),
    (RULE + "exponential, scale: 1, shape: 1}]", ["stragglers.0.shape", "gamma"]),
    (RULE + "slowdown, factor: 0.5}]", ["stragglers.0.factor", ">= 1"]),
    (RULE + "slowdown}]", ["stragglers.0.factor", "missing"]),
    (RULE + "pause}]", ["stragglers.0.kind", "slowdown", "'pause'"]),
    ("stragglers: [{ranks: [], kind: slowdown, factor: 2}]", ["stragglers.0.ranks", "non-empty"]),
    ("stragglers: [{ranks: [-1], kind: slowdown, factor: 2}]", ["stragglers.0.ranks.0", ">= 0"]),
    ("stragglers: [{ranks: [1, 1], kind: slowdown, factor: 2}]", ["stragglers.0.ranks", "twice"]),
    (RULE + "slowdown, factor: 2, first_epoch: 3, last_epoch: 2}]",
     ["stragglers.0.last_epoch 2", "stragglers.0.first_epoch 3"]),
    ("name: a/b", ["name", "letters"]),
    ("name: .a", ["name", "letters"]),
    ("name: ''", ["name", "letters"]),
    ("name: é", ["name", "letters"]),
    ("name: 5", ["name", "in quotes"]),
]  # fmt: skip


@pytest.mark.parametrize("text, parts", BAD)
def test_bad_values_are_refused_in_one_line_that_names_the_key(text, parts):
    message = refusal(read, text)
    assert message.startswith("FILE: ")
    for part in parts:
        assert part in message, message


def test_the_second_rule_is_named_by_its_index():
    good = "{ranks: [1], kind: slowdown, factor: 2}"
    message = refusal(read, f"stragglers: [{good}, {{ranks: [1], kind: gamma, shape: 1}}]")
    assert "stragglers.1.scale" in message


@pytest.mark.parametrize("key", ["epochs", "timeout", "output", "optimizer"])
def test_numbers_too_long_to_print_are_refused(key):
    number = 10**5000
    assert key in refusal(from_mapping, {"name": "x", key: number})
    assert "unknown key" in refusal(from_mapping, {"name": "x", number: 1})


@pytest.mark.parametrize("mapping", [None, [], "x", 3, {}, {"epochs": 1}])
def test_no_mapping_or_no_name(mapping):
    message = refusal(from_mapping, mapping)
    assert "name" in message


def test_shares_are_normalised_and_make_the_policy_static():
    assert read("partition: {shares: [3, 1]}").partition == PartitionConfig(
        policy="static", shares=(0.75, 0.25)
    )
    assert read("partition: {policy: static, shares: [0.3, 0.7]}").partition.shares == (0.3, 0.7)
    assert read("partition: {shares: [1e308, 1e308]}").partition.shares == (0.5, 0.5)


@pytest.mark.parametrize(
    "algorithm, policy, weight",
    [
        ("sync-sgd", "equal", "uniform"),
        ("dp-sgd", "proportional", "uniform"),
        ("edp-sgd", "proportional", "share"),
    ],
)
def test_the_algorithm_fills_in_what_is_null(algorithm, policy, weight):
    config = resolve(read(f"algorithm: {algorithm}"))
    assert (config.partition.policy, config.gradient_weight) == (policy, weight)
    given_text = f"{{algorithm: {algorithm}, gradient_weight: share-over-n, partition: "
    config = resolve(read(given_text + "{policy: equal}}"))
    assert (config.partition.policy, config.gradient_weight) == ("equal", "share-over-n")
    config = resolve(read(given_text + "{shares: [1, 3]}}"))
    assert (config.partition.policy, config.partition.shares) == ("static", (0.25, 0.75))


@pytest.mark.parametrize(
    "text, world_size, parts",
    [
        (RULE + "slowdown, factor: 2}]", 1,
         ["stragglers.0.ranks", "rank 1", "is 1 worker ", "rank 0", "--nproc_per_node=2",
          "stragglers=[]"]),
        ("stragglers: [{ranks: [0], kind: slowdown, factor: 2},"
         " {ranks: [1, 3], kind: slowdown, factor: 2}]", 3,
         ["stragglers.1.ranks", "rank 3", "3 workers", "ranks 0 to 2", "--nproc_per_node=4"]),
        ("partition: {shares: [1, 1, 1]}", 2, ["partition.shares", "3", "2 workers"]),
        ("batch_size: 5", 3, ["batch_size 5", "at least 6"]),
        ("partition: {max_batch: 100}", 2, ["partition.max_batch", "200", "56 short"]),
        ("{batch_size: 10, partition: {max_batch: 3}}", 3, ["9", "1 short"]),
        ("partition: {max_batch: [200, 50]}", 2, ["[200, 50]", "6 short"]),
        ("partition: {max_batch: [200, 100]}", 3, ["partition.max_batch", "2 entries"]),
        ("partition: {min_batch: [2, 9], max_batch: [300, 8]}", 2, ["rank 1", "9", "8"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_number_of_workers(text, world_size, parts):
    message = refusal(check_workers, read(text), world_size)
    for part in parts:
        assert part in message, message


def test_what_fits_the_number_of_workers():
    check_workers(read("{batch_size: 6, partition: {max_batch: 2, shares: [1, 2, 3]}}"), 3)
    check_workers(read(RULE + "slowdown, factor: 2}]"), 2)


def test_differences_are_dotted_keys():
    a = read("stragglers: [{ranks: [1], kind: constant, seconds: 0.1}]")
    b = read("{seed: 1, optimizer: {lr: 0.2}, partition: {shares: [1, 1]},"
             " stragglers: [{ranks: [1], kind: constant, seconds: 0.2}]}")
    keys = {"seed", "optimizer.lr", "partition.policy", "partition.shares",
            "stragglers.0.seconds"}  # fmt: skip
    assert set(differences(a, b)) == set(differences(b, a)) == keys
    assert differences(a, a) == []
    assert differences(a, read("stragglers: []")) == ["stragglers"]


# Property tests.

SECTIONS = {key.rpartition(".")[0] for key in KEYS if "." in key} - {"stragglers.N"}
NAMES = sorted({part for key in KEYS for part in key.split(".")})
WORDS = NAMES + "constant gamma slowdown exponential static equal 1e-3 1e999 nan".split()
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 600),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=5),
    st.dates(),
    st.binary(max_size=3),
)
keys = st.one_of(st.sampled_from(NAMES), scalars)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=5)
    ),
    max_leaves=20,
)


@given(st.one_of(values, st.dictionaries(st.sampled_from(NAMES), values, max_size=4)))
@settings(max_examples=400, deadline=None)
def test_arbitrary_values_raise_nothing_but_user_errors(value):
    for candidate in (value, {"name": "x", **value} if isinstance(value, dict) else value):
        try:
            config = from_mapping(candidate)
        except UserError as error:
            assert str(error).isprintable()
        else:
            assert from_mapping(to_mapping(config)) == config


@given(st.text(max_size=30) | st.text(alphabet="ab:[]{}&*!-?<|>%@'\"#, \n\t0.", max_size=30))
@settings(max_examples=400, deadline=None)
def test_arbitrary_yaml_raises_nothing_but_user_errors(text):
    try:
        files.parse(text, "FILE")
    except UserError as error:
        assert str(error).isprintable()


positive = st.floats(1e-6, 1e6)
words = st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1)


def rules(kind: str, **own) -> st.SearchStrategy:
    return st.fixed_dictionaries(
        {
            "ranks": st.lists(st.integers(0, 9), min_size=1, unique=True),
            "kind": st.just(kind),
            **own,
        },
        optional={"first_epoch": st.integers(0, 5), "last_epoch": st.none() | st.integers(5, 9)},
    )


good_configs = st.fixed_dictionaries(
    {"name": st.from_regex(r"[a-z0-9_=+,-][a-z.0-9_=+,-]{0,20}", fullmatch=True)},
    optional={
        "algorithm": st.sampled_from(["sync-sgd", "dp-sgd", "edp-sgd"]),
        "seed": st.integers(0, 2**32 - 1),
        "timeout": st.floats(700, 604800),
        "output": words,
        "model": st.fixed_dictionaries({}, optional={"name": words}),
        "data": st.fixed_dictionaries(
            {},
            optional={
                "subset": st.none() | st.integers(1, 10**9),
                "std": st.none() | st.lists(positive, min_size=3, max_size=3),
                "flip": st.booleans(),
            },
        ),
        "optimizer": st.fixed_dictionaries(
            {}, optional={"lr": positive, "weight_decay": st.just("1e-4")}
        ),
        "partition": st.fixed_dictionaries(
            {"policy": st.sampled_from([None, "static"])},
            optional={"max_batch": st.none() | st.integers(2, 99)},
        ).flatmap(
            lambda part: st.lists(positive, min_size=1, max_size=6).map(
                lambda shares: {**part, "shares": shares}
            )
        ),
        "stragglers": st.lists(
            st.one_of(
                rules("constant", seconds=st.floats(0, 599)),
                rules("constant", fraction=st.floats(0, 9)),
                rules("gamma", shape=st.floats(1e-6, 20), scale=st.floats(1e-6, 20)),
                rules("exponential", scale=st.floats(1e-6, 599)),
                rules("slowdown", factor=st.floats(1, 99)),
            ),
            max_size=3,
        ),
    },
)


@given(good_configs)
@settings(max_examples=150, deadline=None)
def test_round_trip_through_yaml(mapping):
    config = from_mapping(mapping)
    for given_config in (config, resolve(config)):
        text = yaml.safe_dump(to_mapping(given_config))
        again = from_mapping(files.parse(text, "config.yaml"))
        assert again == given_config
        assert differences(again, given_config) == []
    assert resolve(resolve(config)) == resolve(config)
    if config.partition.shares is not None:
        assert math.isclose(math.fsum(config.partition.shares), 1, abs_tol=1e-12)
        ratio = config.partition.shares[0] / config.partition.shares[-1]
        given_shares = mapping["partition"]["shares"]
        assert math.isclose(ratio, given_shares[0] / given_shares[-1], rel_tol=1e-12)


# Files.


@pytest.mark.parametrize(
    "text, parts",
    [
        ("name: x\nname: y\n", ["line 2", "name", "twice"]),
        ("name: x\noptimizer: {lr: 1, lr: 2}\n", ["line 2", "lr", "twice"]),
        ("name: x\nepochs: [1\nseed: 2\n", ["line 3"]),
        ("name: x\n\tepochs: 1\n", ["line 2"]),
        ("name: x\nseed: 2024-99-99\n", ["line 2", "timestamp"]),
        (f"name: x\nseed: {'9' * 5000}\n", ["line 2", "int"]),
        ("name: x\nseed: \x01\n", ["line 2", "character"]),
        ("[" * 5000, ["deep"]),
        ("- name\n", ["mapping"]),
        ("", ["mapping"]),
        ("name: !!python/object:os.system {}", ["line 1", "tag"]),
        ("name: x\n---\nname: y\n", ["line 2", "document"]),
    ],
)
def test_broken_files(tmp_path, text, parts):
    path = tmp_path / "broken.yaml"
    path.write_text(text, encoding="utf-8")
    message = refusal(parse, ["--config", str(path)])
    for part in ["broken.yaml", *parts]:
        assert part in message, message


def test_unreadable_files(tmp_path):
    path = tmp_path / "latin.yaml"
    path.write_bytes("name: é".encode("latin-1"))
    assert "UTF-8" in refusal(parse, ["--config", str(path)])
    assert "cannot be read" in refusal(files.read_mapping, tmp_path)


@pytest.mark.parametrize("name", ["nowhere/x.yaml", "lenet-lo", "", "\0", "x" * 5000, "a\nb"])
def test_a_missing_file_lists_the_configs_that_ship(name):
    message = refusal(parse, ["--config", name])
    assert "demo, imagenet-resnet50, lenet-high, lenet-low" in message


def test_a_missing_file_suggests_the_nearest_config():
    assert "did you mean lenet-low?" in refusal(parse, ["--config", "lenet-lw"])


def test_merged_keys_may_be_given_again():
    assert files.parse("x: &x {a: 1}\ny: {<<: *x, a: 2}", "FILE")["y"] == {"a": 2}


# name: model, epochs, lr, weight decay, the delay's key and value.
SHIPPED = {
    "resnet50-low": ("resnet50", 150, 0.1, 5e-4, "seconds", 0.1),
    "resnet50-high": ("resnet50", 150, 0.1, 5e-4, "seconds", 0.2),
    "vgg16-low": ("vgg16", 150, 0.1, 5e-4, "seconds", 0.01),
    "vgg16-high": ("vgg16", 150, 0.1, 5e-4, "seconds", 0.02),
    "lenet-low": ("lenet", 20, 0.05, 5e-4, "fraction", 0.45),
    "lenet-high": ("lenet", 20, 0.05, 5e-4, "fraction", 0.9),
    "resnet20-low": ("resnet20", 60, 0.1, 1e-4, "fraction", 0.45),
    "resnet20-high": ("resnet20", 60, 0.1, 1e-4, "fraction", 0.9),
    "demo": ("lenet", 8, 0.05, 5e-4, "fraction", 0.9),
}


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_shipped_configs(name):
    config = parse(["--config", name]).config
    model, epochs, lr, weight_decay, key, delay = SHIPPED[name]
    assert (config.name, config.model.name, config.epochs) == (name, model, epochs)
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.weight_decay) == (lr, weight_decay)
    assert (optimizer.momentum, optimizer.nesterov) == (0.9, True)
    assert config.stragglers == (StragglerRule(ranks=(1,), kind="constant", **{key: delay}),)
    assert (config.batch_size, config.seed, config.schedule.kind) == (256, 42, "cosine")
    assert config.algorithm == "edp-sgd"
    check_workers(config, 2)
    head = (files.FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[:2]
    assert all(line.startswith("# ") for line in head)
    assert f"torchrun --standalone --nproc_per_node=2 trainer.py --config {name}" in head[1]


def test_the_large_batch_recipe_for_1000_classes():
    """Goyal et al. 2017, section 5.1, with 64 workers: a global batch of 8,192, a rate of 3.2."""
    config = for_workers(parse(["--config", "imagenet-resnet50"]).config, 64)
    assert (config.batch_size, config.epochs, config.precision) == (8192, 90, "bf16")
    assert (config.model.name, config.data.image_size) == ("torchvision/resnet50", 224)
    assert (config.data.crop, config.data.flip, config.label_smoothing) == ("resized", True, 0.1)
    rates = [learning_rate(config, epoch) for epoch in (0, 5, 29, 30, 60, 80)]
    assert rates == pytest.approx([0.1, 3.2, 3.2, 0.32, 0.032, 0.0032])
    assert config.optimizer.weight_decay == 1e-4 and config.stragglers == ()


def test_no_other_configs_ship():
    assert files.shipped() == sorted([*SHIPPED, "imagenet-resnet50"])


@pytest.mark.parametrize(
    "data, words",
    [
        ("{crop: resized}", ["data.crop resized", "image_folder", "data.image_size"]),
        ("{name: image_folder, crop: resized}", ["data.crop resized", "data.image_size"]),
        ("{name: image_folder, crop: resized, image_size: 8, placement: memory}",
         ["data.crop resized", "data.placement"]),
        ("{test_resize: 9}", ["data.test_resize", "image_folder"]),
        ("{name: image_folder, image_size: 8, test_resize: 7}",
         ["data.test_resize 7", "data.image_size 8"]),
    ],
)  # fmt: skip
def test_crops_that_cannot_be_made_are_refused(data, words):
    with pytest.raises(UserError) as error:
        read(f"data: {data}")
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


# The command line.


def test_the_default_is_the_authors_own_setting():
    launch = parse([])
    config = launch.config
    assert (config.name, config.algorithm) == ("resnet50-low", "edp-sgd")
    assert (config.partition.policy, config.gradient_weight) == ("proportional", "share")
    assert launch == Launch(config=config)


def test_command_line_over_file_over_default(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nepochs: 7\noptimizer: {lr: 0.5, weight_decay: 0}\n")
    config = parse(["--config", str(path), "optimizer.lr=1e-2", "partition.min_batch=4"]).config
    assert config.optimizer.lr == 0.01  # command line
    assert (config.epochs, config.optimizer.weight_decay) == (7, 0.0)  # file
    assert (config.batch_size, config.optimizer.momentum) == (256, 0.9)  # default
    assert config.partition.min_batch == 4


def test_options_and_overrides_mix_in_any_order(recwarn):
    launch = parse(
        ["epochs=3", "--seed", "7", "stragglers.0.seconds=0.25", "--local_rank=1", "--device",
         "cpu", "data.flip=false", "--local-world-size", "2", "--config", "vgg16-low",
         "--resume", "never", "--dry-run", "--backend=gloo", "--overwrite", "--output", "out",
         "--algorithm", "dp-sgd", "data.cache=/tmp/c"]
    )  # fmt: skip
    config = launch.config
    assert (config.name, config.epochs, config.seed, config.output) == ("vgg16-low", 3, 7, "out")
    assert (config.device, config.backend, config.data.flip) == ("cpu", "gloo", False)
    assert config.stragglers[0].seconds == 0.25
    assert config.stragglers[0].ranks == (1,)
    assert (config.algorithm, config.gradient_weight) == ("dp-sgd", "uniform")
    assert (launch.resume, launch.overwrite, launch.dry_run) == ("never", True, True)
    assert (launch.local_rank, launch.local_world_size) == (1, 2)
    assert sorted(launch.overrides) == [
        "backend=gloo", "data.flip=false", "device=cpu", "epochs=3", "stragglers.0.seconds=0.25",
    ]  # fmt: skip
    assert not recwarn.list


def test_whole_lists_and_items_of_lists():
    assert parse(["stragglers=[]"]).config.stragglers == ()
    rule = "stragglers=[{ranks: [0, 1], kind: slowdown, factor: 2}]"
    assert parse([rule]).config.stragglers[0].factor == 2.0
    assert parse(["stragglers.0.ranks.0=3"]).config.stragglers[0].ranks == (3,)
    rule = parse(["stragglers.0.seconds=null", "stragglers.0.fraction=0.5"]).config.stragglers[0]
    assert (rule.seconds, rule.fraction) == (None, 0.5)


def test_an_override_of_one_rule_leaves_an_aliased_one_alone(tmp_path):
    path = tmp_path / "alias.yaml"
    path.write_text("name: x\nstragglers: [&r {ranks: [1], kind: slowdown, factor: 2}, *r]\n")
    stragglers = parse(["--config", str(path), "stragglers.0.factor=3"]).config.stragglers
    assert [rule.factor for rule in stragglers] == [3.0, 2.0]


def test_the_same_value_twice_is_fine():
    launch = parse(["--seed", "3", "seed=3", "epochs=2", "epochs=2"])
    assert launch.config.seed == 3
    assert launch.overrides == ("epochs=2",)


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["--algoritm", "dp-sgd"], ["--algoritm", "did you mean --algorithm?"]),
        (["--algoritm=dp-sgd"], ["--algoritm", "did you mean --algorithm?"]),
        (["--conf", "demo"], ["--conf", "did you mean --config?"]),
        (["--epochs", "3"], ["--epochs", "epochs=VALUE"]),
        (["--batch-size", "3"], ["--batch-size", "batch_size=VALUE"]),
        (["--optimizer.lr=3"], ["--optimizer.lr", "optimizer.lr=VALUE"]),
        (["--zzz"], ["--zzz", "--config", "--dry-run"]),
        (["--a\nb"], ["unknown option"]),
        (["--seed"], ["--seed", "expected one argument"]),
        (["--seed", "x"], ["seed", "whole number", "'x'"]),
        (["--seed", ""], ["seed", "whole number"]),
        (["--seed", "[1"], ["--seed"]),
        (["--algorithm", "sgd"], ["algorithm", "sync-sgd, dp-sgd or edp-sgd"]),
        (["--device", "tpu"], ["device", "cpu or cuda"]),
        (["--output", ""], ["output", "non-empty"]),
        (["--resume", "maybe"], ["--resume", "auto", "never"]),
        (["--local_rank", "x"], ["local_rank", "'x'"]),
        (["--local_rank", "-1"], ["local_rank", ">= 0"]),
        (["--local-world-size", "0"], ["local_world_size", ">= 1"]),
        (["--seed", "1", "--seed", "2"], ["--seed", "twice"]),
        (["--config", "demo", "--config", "lenet-low"], ["--config", "twice"]),
        (["--seed", "1", "seed=2"], ["seed", "twice", "1 and 2"]),
        (["epochs=1", "epochs=2"], ["epochs", "twice", "1 and 2"]),
        (["stragglers=[]", "stragglers.0.seconds=1"], ["stragglers and stragglers.0.seconds"]),
        (["lenet-low"], ["lenet-low", "key=value", "--config lenet-low"]),
        (["epochs"], ["epochs", "key=value"]),
        (["=3"], ["=3", "key=value"]),
        (["a..b=3"], ["a..b=3", "key=value"]),
        (["epochs="], ["epochs", "null"]),
        (["epochs=[1"], ["epochs", "line 1"]),
        (["epochs=0"], ["epochs", ">= 1"]),
        (["optimizer={lr: 1}"], ["optimizer", "optimizer.lr=VALUE"]),
        (["optimizer.lrr=1"], ["optimizer.lrr", "did you mean optimizer.lr?"]),
        (["lr=1"], ["lr", "did you mean optimizer.lr?"]),
        (["optimizer.lr.x=1"], ["optimizer.lr", "a number > 0"]),
        (["model=lenet"], ["model", "model.name=VALUE"]),
        (["stragglers.1.seconds=1"], ["stragglers.1.seconds", "no list item 1", "1 items"]),
        (["stragglers.00.seconds=1"], ["stragglers.00.seconds", "no list item 00"]),
        (["epochs.0=1"], ["epochs.0", "no list item 0"]),
        (["stragglers.x.seconds=1"], ["stragglers.x.seconds", "no list item x"]),
        (["optimizer.momentum=0"], ["optimizer.nesterov"]),
        (["stragglers=[{kind: gamma, kind: constant}]"], ["stragglers", "kind", "twice"]),
        ([".".join("a" * 5000) + "=1"], ["key=value"]),
    ],
)
def test_bad_command_lines(arguments, parts):
    message = refusal(parse, arguments)
    assert message.startswith("command line: ")
    for part in parts:
        assert part in message, message


@given(
    st.lists(
        st.builds("{}={}".format, st.sampled_from(KEYS) | st.text(max_size=4), st.text(max_size=8))
        | st.text(max_size=6).filter(lambda text: not re.match("--?h", text)),
        max_size=3,
    )
)
@settings(max_examples=200, deadline=None)
def test_arbitrary_command_lines_raise_nothing_but_user_errors(arguments):
    try:
        parse(arguments)
    except UserError as error:
        assert str(error).isprintable()


def test_help_lists_every_key_in_100_columns(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    listed = re.findall(r"^  ([a-zN_.]+): ", text, flags=re.MULTILINE)
    assert sorted(listed) == sorted(KEYS)
    assert re.search(r"optimizer\.momentum: a number >= 0 and < 1; default 0\.9", text)
    for option in ["--config", "--dry-run", "--local-rank", "--local_world_size", "--overwrite"]:
        assert option in text


def test_help_in_a_process_of_its_own_needs_no_torch():
    code = (
        "import sys; from configs.command_line import parse; import configs.schema\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "parse(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


# Names of runs.


def named(*overrides: str) -> str:
    return run_name(Launch(config=read(""), overrides=overrides))


def test_names_of_runs():
    assert named() == "x"
    assert named("epochs=3", "backend=gloo") == "x+backend=gloo,epochs=3"
    assert named("stragglers.0.seconds=0.2") == "x+stragglers.0.seconds=0.2"
    assert re.fullmatch(r"x\+stragglers=__-[0-9a-f]{8}", named("stragglers=[]"))
    assert re.fullmatch(r"x\+data\.root=_tmp_\.\._a-[0-9a-f]{8}", named("data.root=/tmp/../a"))
    assert len(named(*(f"data.root={'a' * 70}{i}" for i in range(3)))) == len("x+") + 80


def test_what_does_not_name_a_run():
    launch = parse(["--algorithm", "dp-sgd", "seed=3", "--output=o", "data.cache=c", "name=y"])
    assert launch.overrides == ()
    assert run_name(launch) == "y"


def test_the_shortcut_names_a_run_as_its_key_does():
    assert run_name(parse(["--device", "cpu"])) == run_name(parse(["device=cpu"]))


override_sets = st.sets(
    st.builds(
        "{}={}".format,
        st.sampled_from(KEYS),
        st.text(alphabet="ab,=/._ +0\n-é", max_size=12) | st.text(min_size=60, max_size=90),
    ),
    max_size=4,
)


@given(override_sets, override_sets)
@settings(max_examples=400, deadline=None)
def test_run_names_tell_override_sets_apart(first, second):
    names = [named(*overrides) for overrides in (first, second)]
    assert (names[0] == names[1]) == (first == second)
    assert named(*reversed(sorted(first))) == names[0]
    for name in names:
        assert re.fullmatch(r"x(\+[A-Za-z0-9.=_,-]{1,80})?", name)
        assert ".." not in Path(name).parts
