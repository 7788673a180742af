"""How long a step waits for its all-reduce.

A ring all-reduce of M bytes among n workers passes 2 (n-1) messages of M/n bytes one after the
other (Patarasuk and Yuan, Journal of Parallel and Distributed Computing 69(2), 2009):

    2 (n-1)/n * M / bandwidth + 2 (n-1) * latency

Overlapped with the backward pass as DistributedDataParallel does it (Li et al., VLDB 13(12), 2020),
the gradients go out in k buckets. The model assumes equal buckets that become ready at even spaces
over the backward pass of length W, and one ring at a time, c seconds each. What is left to wait for
after the last bucket is ready is then

    max(c, k c - (k-1)/k * W)

since either each bucket is through before the next is ready, or the first one starts a queue that
never empties. A bucket can only be summed once all workers have it, so W is the backward pass of
the step's slowest worker; a fixed cost (an injected delay, the host) hides nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

# PyTorch's default bucket_cap_mb.
BUCKET_BYTES = 25 * 2**20
# Backward takes about twice as long as forward: two matrix products for each one of the forward
# pass (Kaplan et al., arXiv 2001.08361, section 2.1).
BACKWARD_SHARE = 2 / 3


@dataclass(frozen=True)
class Exchange:
    """An all-reduce in `buckets` rings of `bucket_seconds` each; one bucket is not overlapped.

    backward_share: the part of a worker's a * b that is its backward pass.
    """

    bucket_seconds: float
    buckets: int = 1
    backward_share: float = BACKWARD_SHARE

    def exposed(self, compute: np.ndarray) -> np.ndarray:
        """Seconds [...] that are not hidden, by the slowest worker's a * b seconds [...]."""
        window = (self.buckets - 1) / self.buckets * self.backward_share * compute
        return np.maximum(self.bucket_seconds, self.buckets * self.bucket_seconds - window)


def ring_seconds(workers: int, size: float, bandwidth: float, latency: float) -> float:
    """One ring all-reduce of `size` bytes; bandwidth in bytes/s per worker, latency in s."""
    hops = 2 * (workers - 1)
    return hops / workers * size / bandwidth + hops * latency


def ring(workers: int, size: float, bandwidth: float, latency: float, overlapped: bool) -> Exchange:
    """The exchange of `size` bytes of gradients, whole or in buckets."""
    buckets = math.ceil(size / BUCKET_BYTES) if overlapped else 1
    return Exchange(ring_seconds(workers, size / buckets, bandwidth, latency), buckets)
