"""One worker's part of a step: forward, backward, and the weighted sum of all workers' gradients.

The sum is made by DistributedDataParallel, overlapped with the backward pass (`ddp`), or by one
all-reduce of one flat buffer after it (`flat`). A worker whose device runs out of memory finishes
its part alone in micro-batches, with the same gradient to rounding, while the others wait; it asks
for a smaller batch from the next rebalance on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from balancer import Balancer, broadcast_state, wrap
from configs.errors import UserError

# Outputs [b, classes] and mean loss of a batch, by calling the given model.
Forward = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]

# Of the batch that did not fit, this part is asked for next time.
_CAP = 0.9


class Exchange(ABC):
    """Makes gradients that are, on all workers, the weighted sum of the workers' mean gradients.

    module: on its device, its weights as they were built; rank 0's are given to all. forward: the
    loss; remember: called with a lower cap when memory did not suffice and the run has to end.
    """

    model: nn.Module
    """What the forward pass calls."""

    def __init__(
        self,
        module: nn.Module,
        balancer: Balancer,
        forward: Forward,
        remember: Callable[[int], None],
    ) -> None:
        self._module, self._balancer = module, balancer
        self._forward, self._remember = forward, remember
        self._in_last_backward = False

    def learn(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Leaves the summed gradient in the module; returns outputs [b, classes] and mean loss.

        Raises UserError where the device's memory does not suffice and part of the gradient may
        have been sent already.
        """
        parts = -(-len(images) // max(1, self._balancer.cap))
        while True:
            try:
                return self._accumulate(images, labels, parts)
            except torch.OutOfMemoryError as error:
                reason = " ".join(str(error).split())
            # Only here, as the exception kept what had filled the memory.
            parts = self._more_parts(len(images), parts, reason)

    @abstractmethod
    def _only_adding_up(self) -> AbstractContextManager:
        """Within it, a backward pass adds to the gradients and sends nothing."""

    @abstractmethod
    def _finish(self) -> None:
        """Waits for the sum, or makes it."""

    @abstractmethod
    def _may_repeat(self) -> bool:
        """Whether a step that was broken off can be done again: no gradient has left."""

    def _accumulate(self, images: Tensor, labels: Tensor, parts: int) -> tuple[Tensor, Tensor]:
        self._in_last_backward = False
        pieces = list(zip(images.chunk(parts), labels.chunk(parts)))
        outputs, total = [], torch.zeros((), device=images.device, dtype=torch.float64)
        for number, (inputs, targets) in enumerate(pieces, 1):
            last = number == len(pieces)
            with nullcontext() if last else self._only_adding_up():
                guesses, loss = self._forward(self.model, inputs, targets)
                if last:
                    self._balancer.clock.mark("forward")
                scaled = loss * (len(inputs) / len(images))
                self._in_last_backward = last
                scaled.backward()
            outputs.append(guesses.detach())
            total += scaled.detach()
        self._finish()
        return torch.cat(outputs), total

    def _more_parts(self, samples: int, parts: int, reason: str) -> int:
        cap = max(1, int(_CAP * -(-samples // parts)))
        if not self._may_repeat() or parts >= samples:
            self._remember(cap)
            raise UserError(
                f"out of memory with {samples} samples at step {self._balancer.next_step}, and "
                f"this step cannot be repeated ({reason}): start again to "
                f"continue with at most {cap} on this rank, or set partition.max_batch"
            )
        self._balancer.announce_cap(cap)
        self._module.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return min(2 * parts, samples)


class DdpExchange(Exchange):
    """By DistributedDataParallel: each bucket of gradients leaves as soon as it is ready."""

    def __init__(self, module: nn.Module, balancer: Balancer, *arguments: Callable) -> None:
        super().__init__(module, balancer, *arguments)
        self.model = wrap(module)
        balancer.attach(self.model)

    def _only_adding_up(self) -> AbstractContextManager:
        return self.model.no_sync()

    def _finish(self) -> None:
        pass

    def _may_repeat(self) -> bool:
        # A backward pass that is broken off leaves DDP's own counts half-way, sent or not.
        return self._balancer.buckets_sent == 0 and not self._in_last_backward


class FlatExchange(Exchange):
    """By one all-reduce of all gradients after the backward pass."""

    def __init__(self, module: nn.Module, balancer: Balancer, *arguments: Callable) -> None:
        super().__init__(module, balancer, *arguments)
        broadcast_state(module)
        self.model = module

    def _only_adding_up(self) -> AbstractContextManager:
        return nullcontext()

    def _finish(self) -> None:
        self._balancer.reduce_flat(self._module.parameters())

    def _may_repeat(self) -> bool:
        return True


EXCHANGES = {"ddp": DdpExchange, "flat": FlatExchange}
