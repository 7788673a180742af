"""One worker's part of a step: forward, backward, and the weighted sum of all workers' gradients.

The sum is made by DistributedDataParallel, overlapped with the backward pass (`ddp`), or by one
all-reduce of one flat buffer after it (`flat`). A worker whose device runs out of memory finishes
its part alone in micro-batches, with the same gradient to rounding, while the others wait; it asks
for a smaller batch from the next rebalance on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

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

    def learn(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Leaves the summed gradient in the module; returns outputs [b, classes] and mean loss.

        Raises UserError where the device's memory does not suffice and part of the gradient may
        have been sent already.
        """
        parts = -(-len(images) // max(1, self._balancer.cap))
        while True:
            try:
                return self._learn_in(parts, images, labels)
            except torch.OutOfMemoryError as error:
                reason = " ".join(str(error).split())
            # Only here, as the exception kept what had filled the memory.
            parts = self._more_parts(len(images), parts, reason)

    @abstractmethod
    def _hand_over(self, gradients: Sequence[Tensor], image: Tensor) -> None:
        """Exchanges ready gradients, one for each parameter; image: one sample [1, …]."""

    def _finish(self) -> None:
        """Makes the sum after the backward pass, where it is not made during it."""

    def _may_repeat(self) -> bool:
        """Whether a step that was broken off can be done again: no gradient has left."""
        return True

    def _learn_in(self, parts: int, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if parts > 1:
            return self._learn_in_parts(parts, images, labels)
        outputs, loss = self._forward(self.model, images, labels)
        self._balancer.clock.mark("forward")
        loss.backward()
        self._finish()
        return outputs.detach(), loss.detach()

    def _learn_in_parts(self, parts: int, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The same gradient from micro-batches, made apart from the exchange and then handed over.

        Under DDP a backward pass that had been begun could not be done again.
        """
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        gradients = [torch.zeros_like(parameter) for parameter in parameters]
        outputs, total = [], torch.zeros((), device=images.device, dtype=torch.float64)
        for inputs, targets in zip(images.chunk(parts), labels.chunk(parts)):
            guesses, loss = self._forward(self._module, inputs, targets)
            loss = loss * (len(inputs) / len(images))
            for gradient, more in zip(gradients, torch.autograd.grad(loss, parameters)):
                gradient += more
            outputs.append(guesses.detach())
            total += loss.detach()
        self._hand_over(gradients, images[:1])
        return torch.cat(outputs), total

    def _more_parts(self, samples: int, parts: int, reason: str) -> int:
        cap = max(1, int(_CAP * -(-samples // parts)))
        if not self._may_repeat() or parts >= samples:
            self._remember(cap)
            raise UserError(
                f"out of memory with {samples} samples at step {self._balancer.next_step}, and "
                f"this step cannot be repeated ({reason}): start again to continue with at most "
                f"{cap} on this rank, or set partition.max_batch"
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

    def _hand_over(self, gradients: Sequence[Tensor], image: Tensor) -> None:
        # A forward pass makes DDP ready to send. In evaluation mode it leaves no other trace.
        self._module.eval()
        self.model(image)
        self._module.train()
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        # The gradient of this sum is `gradients`: DDP's hooks see them come, bucket by bucket.
        torch.autograd.backward(parameters, gradients)

    def _may_repeat(self) -> bool:
        # DDP counts gradients as they come; a count that has begun cannot be taken back.
        return all(parameter.grad is None for parameter in self._module.parameters())


class FlatExchange(Exchange):
    """By one all-reduce of all gradients after the backward pass."""

    def __init__(self, module: nn.Module, balancer: Balancer, *arguments: Callable) -> None:
        super().__init__(module, balancer, *arguments)
        broadcast_state(module)
        self.model = module

    def _hand_over(self, gradients: Sequence[Tensor], image: Tensor) -> None:
        parameters = (p for p in self._module.parameters() if p.requires_grad)
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        self._finish()

    def _finish(self) -> None:
        self._balancer.reduce_flat(self._module.parameters())


EXCHANGES = {"ddp": DdpExchange, "flat": FlatExchange}
