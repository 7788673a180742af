"""A made-up set of 32 x 32 colour images in ten classes, for tests and trials without data.

Each class has a smooth random pattern. An image shows its class's pattern shifted, over a weaker
pattern of any class, under noise: a small network learns it in a few epochs, but not at once, and
not without error.
"""

from __future__ import annotations

import numpy as np

from data.decoding import histogram, mean_and_std
from data.images import ArrayImages, Data

CLASSES = 10
SIZE = 32
STREAM = 0x73796E  # the set's own seed: runs differ in how they train, not in what they see
CHUNK = 512  # samples that share a generator
CELLS = 6  # random values along a pattern's side, interpolated between
SHIFT = 8  # pixels that a pattern may be shifted by, in each direction
PATTERN = 40.0  # amplitudes, of 255
DISTRACTOR = 34.0
NOISE = 80  # uniform within -80..80


def synthetic_data(train_samples: int, test_samples: int) -> Data:
    """Training and test set, always the same; sample i does not depend on the number of samples.

    10,000 samples take 31 MB.
    """
    patterns = _patterns(np.random.default_rng(np.random.SeedSequence(STREAM)))
    train = _images(patterns, train_samples, split=0)
    test = _images(patterns, test_samples, split=1)
    mean, std = mean_and_std(histogram(train.read(np.arange(len(train)))))
    classes = tuple(f"pattern {number}" for number in range(CLASSES))
    return Data(train, test, classes, tuple(mean), tuple(std), SIZE)


def _patterns(generator: np.random.Generator) -> np.ndarray:
    """Smooth random fields of unit variance, one per class: float32 [10, 3, side, side]."""
    side = SIZE + SHIFT
    coarse = generator.standard_normal((CLASSES, 3, CELLS, CELLS))
    # Linear interpolation along one axis, as a matrix [side, CELLS].
    position = np.linspace(0, CELLS - 1, side)
    weights = np.maximum(0, 1 - np.abs(position[:, None] - np.arange(CELLS)))
    smooth = weights @ coarse @ weights.T
    smooth -= smooth.mean(axis=(2, 3), keepdims=True)
    smooth /= smooth.std(axis=(2, 3), keepdims=True)
    return smooth.astype(np.float32)


def _images(patterns: np.ndarray, count: int, split: int) -> ArrayImages:
    images = np.empty((count, 3, SIZE, SIZE), dtype=np.uint8)
    labels = np.empty(count, dtype=np.int64)
    for number, start in enumerate(range(0, count, CHUNK)):
        sequence = np.random.SeedSequence((STREAM, split, number))
        pixels, classes = _chunk(patterns, np.random.default_rng(sequence))
        rows = slice(start, min(start + CHUNK, count))
        images[rows] = pixels[: count - start]
        labels[rows] = classes[: count - start]
    return ArrayImages(images, labels)


def _chunk(patterns: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """CHUNK samples: uint8 [CHUNK, 3, SIZE, SIZE] and int64 [CHUNK]."""
    labels, others = generator.integers(0, CLASSES, (2, CHUNK))
    noise = generator.integers(-NOISE, NOISE + 1, (CHUNK, 3, SIZE, SIZE), dtype=np.int16)
    own = _shifted(patterns, labels, generator)
    other = _shifted(patterns, others, generator)
    pixels = 128 + PATTERN * own + DISTRACTOR * other + noise
    return pixels.clip(0, 255).astype(np.uint8), labels


def _shifted(
    patterns: np.ndarray, classes: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """A window of each sample's pattern at a random place: float32 [CHUNK, 3, SIZE, SIZE]."""
    windows = np.lib.stride_tricks.sliding_window_view(patterns, (SIZE, SIZE), axis=(2, 3))
    top, left = generator.integers(0, SHIFT + 1, (2, len(classes)))
    return windows[classes, :, top, left]
