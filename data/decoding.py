"""Image files to pixels, threads to do it with, and the channels' mean and deviation."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms import functional as transforms
from tqdm import tqdm

from configs.errors import UserError

CHUNK = 256  # images that one thread decodes at a time
MOST_PIXELS = 2**26  # of one image; a small file can unfold to gigabytes
# Those of torchvision's IMG_EXTENSIONS. Pillow goes by content, and has decoders that start other
# programs: an EPS file called x.png would be run by Ghostscript.
FORMATS = ("BMP", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
PART_AREAS, PART_RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)

Result = TypeVar("Result")


def decode(path: str, size: int, shorter: int | None) -> np.ndarray:
    """One image file as uint8 [3, size, size], in RGB.

    shorter: pixels that the shorter side is brought to (bilinear, antialiased) before the centre is
    cut out. Raises UserError for an unreadable file, or without `shorter` for another size.
    """
    image = _rgb(path, shorter)
    if shorter is not None:
        image = transforms.resize(image, [shorter], InterpolationMode.BILINEAR, antialias=True)
        image = transforms.center_crop(image, [size, size])
    elif image.size != (size, size):
        width, height = image.size
        raise UserError(
            f"image {path} is {width}x{height} pixels, not {size}x{size}: "
            "set data.image_size to bring all images to one size"
        )
    return np.asarray(image).transpose(2, 0, 1)


def decode_part(path: str, size: int, seed: int) -> np.ndarray:
    """A random part of an image file, brought to uint8 [3, size, size] in RGB.

    It has 8 to 100 % of the area and sides as 3:4 to 4:3 (Szegedy et al. 2015, arXiv 1409.4842,
    section 6), drawn by torchvision from `seed` alone. Raises UserError for an unreadable file.
    """
    image = _rgb(path)
    # Not torch.manual_seed: that also seeds GPUs, whose streams fork_rng leaves alone here.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        box = RandomResizedCrop.get_params(image, list(PART_AREAS), list(PART_RATIOS))
    bilinear = InterpolationMode.BILINEAR
    image = transforms.resized_crop(image, *box, [size, size], bilinear, antialias=True)
    return np.asarray(image).transpose(2, 0, 1)


def _rgb(path: str, shorter: int | None = None) -> Image.Image:
    """shorter: what its shorter side is going to be brought to."""
    try:
        with Image.open(path, formats=FORMATS) as file:
            _refuse_deep_pixels(file.mode, path)
            _refuse_many_pixels(file.size, path)
            if shorter is not None:
                _refuse_long_sides(file.size, shorter, path)
            return file.convert("RGB")
    except UserError:
        raise
    except Exception as error:  # damaged files make Pillow's decoders raise anything
        reason = " ".join(str(error).split())
        raise UserError(f"cannot read image {path}: {reason}") from error


def image_side(path: str) -> int:
    """Pixels a side of a square image, from the file's header alone."""
    try:
        with Image.open(path, formats=FORMATS) as file:
            width, height = file.size
            _refuse_many_pixels(file.size, path)
    except UserError:
        raise
    except Exception as error:  # as in `_rgb`
        reason = " ".join(str(error).split())
        raise UserError(f"cannot read image {path}: {reason}") from error
    if width != height:
        raise UserError(
            f"image {path} is {width}x{height} pixels, not square: "
            "set data.image_size to cut all images to one square size"
        )
    return width


def in_threads(
    work: Callable[[int, int], Result], count: int, description: str
) -> Iterator[Result]:
    """`work(start, stop)` over all chunks of `count` samples, on all cores, results in order.

    Shows progress if stderr is a terminal. The first error cancels what has not begun.
    """
    starts = range(0, count, CHUNK)
    bar = tqdm(
        total=count, desc=description, unit="image", disable=not sys.stderr.isatty(), leave=False
    )
    with ThreadPoolExecutor(_cores()) as pool, bar:
        futures = [pool.submit(work, start, min(start + CHUNK, count)) for start in starts]
        try:
            for start, future in zip(starts, futures):
                yield future.result()
                bar.update(min(CHUNK, count - start))
        finally:
            pool.shutdown(cancel_futures=True)


def histogram(images: np.ndarray) -> np.ndarray:
    """How often each channel has each value: uint8 [k, 3, H, W] -> int64 [3, 256]."""
    channels = [np.bincount(images[:, c].ravel(), minlength=256) for c in range(3)]
    return np.stack(channels).astype(np.int64)


def mean_and_std(counts: np.ndarray) -> tuple[list[float], list[float]]:
    """Each channel's mean and (population) standard deviation in units of 0..1, from a histogram.

    Counts are whole numbers, so the result does not depend on the order of the images.
    """
    values = np.arange(256, dtype=np.float64) / 255
    weights = counts / counts.sum(axis=1, keepdims=True)
    mean = weights @ values
    variance = (weights * (values - mean[:, None]) ** 2).sum(axis=1)
    return mean.tolist(), np.sqrt(variance).tolist()


def _refuse_deep_pixels(mode: str, path: str) -> None:
    """Conversion to RGB would cut off 16- and 32-bit values instead of scaling them."""
    if mode[0] in "IF":
        raise UserError(f"image {path} has pixels of more than 8 bits: convert it to 8 bits")


def _refuse_many_pixels(size: tuple[int, int], path: str) -> None:
    width, height = size
    if width * height > MOST_PIXELS:
        raise UserError(
            f"image {path} is {width}x{height} pixels, more than {MOST_PIXELS:,}: make it smaller"
        )


def _refuse_long_sides(size: tuple[int, int], shorter: int, path: str) -> None:
    """A long, thin image would become a huge one if its shorter side grew."""
    width, height = size
    if shorter**2 * max(size) > MOST_PIXELS * min(size):
        raise UserError(
            f"image {path} is {width}x{height} pixels, too long to bring its shorter side to "
            f"{shorter}: cut it"
        )


def _cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
