"""The configuration of a run: every key with its type, default, meaning and allowed values.

`from_mapping` reads what a YAML file holds and refuses what it does not understand, `resolve` fills
in what the algorithm decides, `to_mapping` gives back plain types for `config.yaml`. Configurations
are frozen: nothing changes them during a run.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from configs.checks import check, check_workers, with_normalised_shares
from configs.filling import fill, setting

__all__ = [
    "ALGORITHMS",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PartitionConfig",
    "ScheduleConfig",
    "StragglerRule",
    "check_workers",
    "differences",
    "for_workers",
    "from_mapping",
    "resolve",
    "to_mapping",
]

_LARGEST_BATCH = 2**31 - 1  # records hold batch sizes as int32
_MOST_SYNTHETIC = 1_000_000  # 3 GB
# Where neither batch_size nor batch_per_worker is given: the paper's.
_BATCH_SIZE = 256

# What each algorithm puts where a key is null: (partition.policy, gradient_weight).
ALGORITHMS = {
    "sync-sgd": ("equal", "uniform"),
    "dp-sgd": ("proportional", "uniform"),
    "edp-sgd": ("proportional", "share"),
}


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained."""

    name: str = setting(
        "resnet50", "Model from the registry in models/, or torchvision/NAME as it is."
    )


@dataclass(frozen=True)
class DataConfig:
    """Which data the model sees, and where they lie."""

    name: str = setting(
        "cifar10",
        "Data set; synthetic is made up and needs no download.",
        choices=("cifar10", "image_folder", "synthetic"),
    )
    root: str = setting("data", "Folder that holds the data set or receives the download.")
    cache: str = setting("data/cache", "Folder for unpacked or decoded copies of the data.")
    subset: int | None = setting(
        None, "Number of training samples to use; null uses all.", at_least=1
    )
    test_subset: int | None = setting(
        None, "Number of test samples to use; null uses all.", at_least=1
    )
    image_size: int | None = setting(
        None,
        "Side of the square images in pixels; null keeps the data set's own.",
        at_least=1,
        at_most=4096,
    )
    mean: tuple[float, ...] | None = setting(
        None, "Mean per channel (pixels in 0..1); null takes the data set's own.", length=3
    )
    std: tuple[float, ...] | None = setting(
        None,
        "Standard deviation per channel (pixels in 0..1); null takes the data set's own.",
        length=3,
        above=0,
    )
    crop: str = setting(
        "pad",
        "Training images: padded and cut to the old size at random, or (resized) a part of random"
        " size and shape of each file of an image_folder, brought to image_size.",
        choices=("pad", "resized"),
    )
    crop_padding: int = setting(
        4,
        "For pad: pixels on each side before the random crop; 0 crops nothing.",
        at_least=0,
        at_most=127,  # the draws of data/augment.py are bytes
    )
    test_resize: int | None = setting(
        None,
        "For image_folder: shorter side of test images, of which the centre of image_size is cut"
        " out; null: image_size.",
        at_least=1,
    )
    flip: bool = setting(True, "Whether training images are mirrored at random.")
    placement: str = setting(
        "auto",
        "Keep the data whole in memory, read them by loader processes, or auto: decide by size.",
        choices=("auto", "memory", "loader"),
    )
    memory_limit_gib: float = setting(
        4.0, "Size in GiB up to which auto keeps the data in memory.", above=0
    )
    loader_workers: int = setting(
        2, "Loader processes per worker; 0 loads in the worker itself.", at_least=0, at_most=256
    )
    train_samples: int = setting(
        4096,
        "Number of training samples of the synthetic data set.",
        at_least=1,
        at_most=_MOST_SYNTHETIC,
    )
    test_samples: int = setting(
        1024,
        "Number of test samples of the synthetic data set.",
        at_least=1,
        at_most=_MOST_SYNTHETIC,
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """Stochastic gradient descent with momentum."""

    lr: float = setting(0.1, "Learning rate at the start.", above=0)
    momentum: float = setting(0.9, "Momentum factor.", at_least=0, below=1)
    nesterov: bool = setting(True, "Whether the momentum is Nesterov's; needs momentum > 0.")
    weight_decay: float = setting(5e-4, "L2 penalty factor on all parameters.", at_least=0)


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate follows from the global batch, and how it changes over the run."""

    kind: str = setting(
        "cosine",
        "From epoch to epoch: cosine falls to 0, step falls at milestones, constant stays.",
        choices=("cosine", "step", "constant"),
    )
    milestones: tuple[int, ...] | None = setting(
        None,
        "For step: epochs (from 0) from which on the rate is multiplied by factor once more.",
        at_least=1,
        nonempty=True,
    )
    factor: float = setting(0.1, "For step: what each milestone multiplies the rate by.", above=0)
    scale_lr: str = setting(
        "none",
        "Whether optimizer.lr is multiplied by global batch / reference_batch_size (linear).",
        choices=("none", "linear"),
    )
    reference_batch_size: int = setting(
        256, "For linear: the global batch that optimizer.lr is meant for.", at_least=1
    )
    warmup_epochs: float = setting(
        0.0,
        "For linear: epochs in which the rate grows step by step from optimizer.lr to the scaled"
        " one.",
        at_least=0,
    )


@dataclass(frozen=True)
class PartitionConfig:
    """How the global batch is divided among the workers."""

    policy: str | None = setting(
        None,
        "Equal, given, or by measured times: the paper's rule (proportional), the optimum of a"
        " fitted time model (affine), or an earlier run's (replay); null: by algorithm.",
        choices=("equal", "static", "proportional", "affine", "replay"),
    )
    shares: tuple[float, ...] | None = setting(
        None,
        "Share of each worker for the static policy; normalised, so [3, 1] is [0.75, 0.25].",
        above=0,
        nonempty=True,
    )
    every: str | int = setting(
        "epoch",
        "When shares may change: after each epoch, or each so many steps.",
        choices=("epoch",),
        at_least=1,
    )
    min_batch: int | tuple[int, ...] = setting(
        2,
        "Least samples per step, of each worker or one by one (BatchNorm needs 2).",
        at_least=1,
        at_most=_LARGEST_BATCH,
        nonempty=True,
    )
    max_batch: int | tuple[int, ...] | None = setting(
        None,
        "Most samples per step, of each worker or one by one (memory); null sets no cap.",
        at_least=1,
        at_most=_LARGEST_BATCH,
        nonempty=True,
    )
    min_gain: float = setting(
        0.01,
        "For affine: least part of the step time that a move must promise to save.",
        at_least=0,
        below=1,
    )
    replay: str | None = setting(
        None, "For replay: folder of the run whose batch sizes are taken, step by step."
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """When a run is saved, so that it can go on after an interruption."""

    every: str | int = setting(
        "epoch",
        "When to save: after each epoch, each N epochs, or each so many steps.",
        pattern=r"epoch|[1-9][0-9]{0,8} epochs",
        pattern_meaning="epoch or N epochs",
        at_least=1,
    )
    keep: int = setting(
        2, "How many to keep; of more than one, an older one replaces a damaged one.", at_least=1
    )


@dataclass(frozen=True)
class StragglerRule:
    """A delay of some workers in each step; keys that the kind does not use stay null."""

    ranks: tuple[int, ...] = setting(
        ..., "Global ranks that are delayed.", at_least=0, nonempty=True
    )
    kind: str = setting(
        ...,
        "Delay that is constant, drawn at random (gamma, exponential), or a slowdown.",
        choices=("constant", "gamma", "exponential", "slowdown"),
    )
    seconds: float | None = setting(
        None, "For constant: delay per step in seconds (or fraction instead).", at_least=0
    )
    fraction: float | None = setting(
        None,
        "For constant: delay per step as a fraction of the undelayed step time (or seconds).",
        at_least=0,
    )
    busy_seconds: tuple[float, ...] | None = setting(
        None,
        "For fraction: the undelayed step time of each of `ranks` in seconds; null measures it.",
        above=0,
    )
    shape: float | None = setting(None, "For gamma: shape k; the mean is k * scale.", above=0)
    scale: float | None = setting(
        None, "For gamma and exponential: scale in seconds; exponential's mean.", above=0
    )
    factor: float | None = setting(
        None,
        "For slowdown: how many times longer the worker's own work takes.",
        at_least=1,
        at_most=10_000,
    )
    first_epoch: int = setting(0, "First epoch with the delay (from 0).", at_least=0)
    last_epoch: int | None = setting(
        None, "Last epoch with the delay, inclusive; null delays to the end.", at_least=0
    )


@dataclass(frozen=True)
class Config:
    """Everything that defines a run."""

    name: str = setting(
        ...,
        "Name of the workload and first part of the run's folder.",
        pattern=r"[A-Za-z0-9_+=,-][A-Za-z0-9._+=,-]{0,99}",
        pattern_meaning="at most 100 letters, digits and . _ + = , - (no dot first)",
    )
    algorithm: str = setting(
        "edp-sgd",
        "Equal shares, measured shares with a uniform mean, or with a weighted mean.",
        choices=tuple(ALGORITHMS),
    )
    epochs: int = setting(
        150, "Number of passes over the training data.", at_least=1, at_most=100_000
    )
    batch_size: int | None = setting(
        None,
        "Global batch: samples per step of all workers together; null: batch_per_worker times the"
        " workers, or 256 where that is null too.",
        at_least=1,
        at_most=_LARGEST_BATCH,
    )
    batch_per_worker: int | None = setting(
        None,
        "Mean samples per step and worker, instead of batch_size: more workers, larger batch.",
        at_least=1,
        at_most=_LARGEST_BATCH,
    )
    accumulate: int = setting(
        1,
        "Micro-batches in which a worker computes its part of a step: same gradient, less memory.",
        at_least=1,
    )
    seed: int = setting(
        42, "Seed of weights, order, augmentation and delays.", at_least=0, at_most=2**32 - 1
    )
    model: ModelConfig = setting(ModelConfig(), "Which model is trained.")
    data: DataConfig = setting(DataConfig(), "Which data the model sees.")
    optimizer: OptimizerConfig = setting(OptimizerConfig(), "SGD with momentum.")
    schedule: ScheduleConfig = setting(ScheduleConfig(), "The learning rate over the run.")
    label_smoothing: float = setting(
        0.0,
        "Part of a training label's weight that is spread over all classes; tests have none.",
        at_least=0,
        below=1,
    )
    partition: PartitionConfig = setting(PartitionConfig(), "How the global batch is divided.")
    gradient_weight: str | None = setting(
        None,
        "Weight of a worker's mean gradient: 1/n, its share, or share/n; null: by algorithm.",
        choices=("uniform", "share", "share-over-n"),
    )
    stragglers: tuple[StragglerRule, ...] = setting((), "Delays to inject, one rule each.")
    checkpoint: CheckpointConfig = setting(
        CheckpointConfig(), "When the run's state is saved."
    )
    exchange: str = setting(
        "ddp",
        "Gradient all-reduce by DistributedDataParallel, as one flat buffer, or by Horovod.",
        choices=("ddp", "flat", "horovod"),
    )
    precision: str = setting(
        "fp32", "Number format of the forward pass.", choices=("fp32", "bf16", "fp64")
    )
    memory_format: str = setting(
        "contiguous", "Layout of images in memory.", choices=("contiguous", "channels-last")
    )
    evaluation_batch_size: int = setting(
        500, "Samples per worker and evaluation step.", at_least=1
    )
    backend: str | None = setting(
        None, "Communication library; null: by device.", choices=("nccl", "gloo")
    )
    device: str | None = setting(
        None, "Device kind; null: cuda where there is one.", choices=("cpu", "cuda")
    )
    threads: int | None = setting(
        None,
        "CPU threads per worker; null: OMP_NUM_THREADS, else an even part of the cores.",
        at_least=1,
        at_most=1024,
    )
    timeout: float = setting(
        600.0, "Seconds a collective operation may take.", above=0, at_most=7 * 24 * 3600
    )
    output: str = setting("runs", "Folder that receives the run folders.")


def from_mapping(mapping: object, where: str = "configuration") -> Config:
    """Read and check a configuration; `where` (a file name) begins each error.

    Shares are normalised to sum 1, and shares without a policy set the policy static.
    Raises UserError, one line, for unknown keys, wrong types, bad ranges and contradictions.
    """
    config = fill(Config, mapping, where)
    if config.batch_size is None and config.batch_per_worker is None:
        config = dataclasses.replace(config, batch_size=_BATCH_SIZE)
    check(config, where)
    partition = with_normalised_shares(config.partition, where)
    return dataclasses.replace(config, partition=partition)


def resolve(config: Config) -> Config:
    """Let the algorithm fill in what is null; what was given wins."""
    policy, weight = ALGORITHMS[config.algorithm]
    partition = dataclasses.replace(config.partition, policy=config.partition.policy or policy)
    weight = config.gradient_weight or weight
    return dataclasses.replace(config, partition=partition, gradient_weight=weight)


def for_workers(config: Config, world_size: int) -> Config:
    """The configuration on `world_size` workers: checked, with its global batch in batch_size.

    Raises UserError where it does not fit so many workers.
    """
    if config.batch_size is None:
        config = dataclasses.replace(config, batch_size=config.batch_per_worker * world_size)
    check_workers(config, world_size)
    return config


def to_mapping(config: Config) -> dict[str, Any]:
    """The configuration as nested dicts, lists and scalars; `from_mapping` gives it back."""
    mapping = _plain(dataclasses.asdict(config))
    for rule in mapping["stragglers"]:
        for key in [key for key, value in rule.items() if value is None]:
            del rule[key]
    return mapping


def differences(a: Config, b: Config) -> list[str]:
    """The dotted keys whose values differ; `stragglers` as a whole if the rules' number does."""
    return _differences(_plain(dataclasses.asdict(a)), _plain(dataclasses.asdict(b)), "")


def _plain(value: Any) -> Any:
    """Tuples as lists, at every depth."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value


def _differences(a: Any, b: Any, key: str) -> list[str]:
    """Differing dotted keys below `key`; both values come from the same dataclass."""
    if isinstance(a, dict):
        pairs = [(name, a[name], b[name]) for name in a]
    elif _rules(a) and _rules(b) and len(a) == len(b):
        pairs = [(str(i), *pair) for i, pair in enumerate(zip(a, b))]
    else:
        return [] if a == b else [key]
    prefix = f"{key}." if key else ""
    return [found for name, x, y in pairs for found in _differences(x, y, f"{prefix}{name}")]


def _rules(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)
