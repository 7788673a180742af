"""Random crop and flip, and normalisation, of whole batches on any device.

What happens to a sample is drawn from (seed, epoch, sample) alone, so it depends neither on the
worker that handles the sample nor on the batch it is in; and every operation works value by value,
so results are equal to the bit however samples are grouped into batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional

from configs.errors import UserError

STREAM = 0x617567  # keeps these draws apart from others that use (seed, epoch)
CROP_STREAM = 0x637270
MAX_PADDING = 127  # an offset up to twice the padding fits into a byte


def augmentation_table(count: int, seed: int, epoch: int, padding: int, flip: bool) -> torch.Tensor:
    """The draws for samples 0..count-1: uint8 [count, 3], columns dy, dx, flip.

    dy and dx are offsets of the crop, uniform in 0..2*padding; flip is 0 or 1 with equal
    probability, or always 0. Row i comes from the i-th output of a counter-based generator
    (Philox, Salmon et al. 2011) with (seed, epoch) as key: it does not depend on `count`.
    """
    if not 0 <= padding <= MAX_PADDING:
        raise UserError(f"data.crop_padding: {padding} is not within 0..{MAX_PADDING}")
    bits = _bits(STREAM, count, seed, epoch)
    table = np.empty((count, 3), dtype=np.uint8)
    # 24 bits scaled to a small range are uniform to 2^-16, and no row needs a second draw.
    low_24 = np.uint64(2**24 - 1)
    offsets = np.uint64(2 * padding + 1)
    table[:, 0] = ((bits >> np.uint64(40)) * offsets) >> np.uint64(24)
    table[:, 1] = (((bits >> np.uint64(16)) & low_24) * offsets) >> np.uint64(24)
    table[:, 2] = (bits & np.uint64(1)) if flip else 0
    return torch.from_numpy(table)


def crop_seeds(count: int, seed: int, epoch: int) -> np.ndarray:
    """A seed for each sample's random part of its file, int64 [count] of 0..2^63-1.

    As in `augmentation_table`, row i does not depend on `count`.
    """
    return (_bits(CROP_STREAM, count, seed, epoch) >> np.uint64(1)).astype(np.int64)


def _bits(stream: int, count: int, seed: int, epoch: int) -> np.ndarray:
    """The first `count` outputs, uint64, of the generator of (stream, seed, epoch)."""
    sequence = np.random.SeedSequence((stream, seed, epoch))
    return np.random.Philox(sequence).random_raw(count)


def augment(images: torch.Tensor, draws: torch.Tensor, padding: int) -> torch.Tensor:
    """Pads with zeros, crops to the old size at (dy, dx), and flips from left to right.

    images: uint8 [b, 3, H, W]; draws: uint8 [b, 3], rows of `augmentation_table`, on the same
    device. Returns new uint8 images [b, 3, H, W].
    """
    count, channels, height, width = images.shape
    padded = functional.pad(images, (padding, padding, padding, padding))
    padded_width = width + 2 * padding
    dy, dx, flip = draws.long().unsqueeze(2).unbind(1)  # each [b, 1]
    rows = dy + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device)
    columns = dx + torch.where(flip == 1, width - 1 - columns, columns)
    # One gather from flattened images: twice as fast on a CPU as indexing with four tensors.
    pixels = (rows * padded_width).unsqueeze(2) + columns.unsqueeze(1)
    pixels = pixels.view(count, 1, height * width).expand(-1, channels, -1)
    return padded.flatten(2).gather(2, pixels).view(images.shape)


def normalise(
    images: torch.Tensor,
    mean: torch.Tensor | Sequence[float],
    std: torch.Tensor | Sequence[float],
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    """(images / 255 - mean) / std: uint8 [b, 3, H, W] -> dtype [b, 3, H, W].

    mean and std have one value per channel, in units of 0..1. The arithmetic is float32 (float64
    if that is asked for); a lower precision is rounded to at the end.
    """
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    mean = torch.as_tensor(mean, dtype=arithmetic, device=images.device).view(3, 1, 1)
    std = torch.as_tensor(std, dtype=arithmetic, device=images.device).view(3, 1, 1)
    values = images.to(arithmetic).div_(255).sub_(mean).div_(std)
    # Reordering comes last: the steps before run twice as fast on contiguous memory.
    return values.to(dtype, memory_format=memory_format)
