"""One worker's part of a step: forward, backward, and the weighted sum of all workers' gradients.

The sum is made by DistributedDataParallel (`ddp`) or Horovod (`horovod`), both overlapped with the
backward pass, or by one all-reduce of one flat buffer after it (`flat`). A worker's part may be
computed in micro-batches (`accumulate`), weighted by their samples: their gradients add up to that
of the whole part, and leave with the last one. A worker whose device runs out of memory finishes
its part alone in more of them, while the others wait, and asks for a smaller batch from the next
rebalance on. The gradient is the same to rounding; BatchNorm normalises by micro-batch then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import horovod_library
from balancer import Balancer, broadcast_state, wrap
from configs.errors import UserError

# Outputs [b, classes] and mean loss of a batch, by calling the given model.
Forward = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]

# Of the batch that did not fit, this part is asked for next time.
_CAP = 0.9


class Exchange(ABC):
    """Makes gradients that are, on all workers, the weighted sum of the workers' mean gradients.

    module: on its device, its weights as they were built; rank 0's are given to all. forward: the
    loss; accumulate: micro-batches per step, fewer where they would be of less than two samples.
    """

    model: nn.Module
    """What the forward pass calls."""

    def __init__(
        self, module: nn.Module, balancer: Balancer, forward: Forward, accumulate: int = 1
    ) -> None:
        self._module, self._balancer, self._forward = module, balancer, forward
        self._accumulate = accumulate
        # Of gradients that micro-batches have left and none has sent: as they were, with their
        # versions, before the last backward pass; None before it.
        self._kept_back: list[tuple[nn.Parameter, Tensor, int]] | None = []

    def learn(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Leaves the summed gradient in the module; returns outputs [b, classes] and mean loss.

        Raises UserError where the device's memory does not even hold one sample.
        """
        usual = max(1, min(self._accumulate, len(images) // 2))
        # The cap is of a step that is computed in the usual way.
        parts = min(usual * -(-len(images) // max(1, self._balancer.cap)), len(images))
        while True:
            try:
                if parts > usual:
                    return self._learn_apart(parts, images, labels)
                if parts > 1:
                    return self._learn_accumulating(parts, images, labels)
                return self._learn_whole(images, labels)
            except torch.OutOfMemoryError as error:
                reason = " ".join(str(error).split())
            # Only here, as the exception kept what had filled the memory.
            self._drop_kept_back()
            parts = self._more_parts(len(images), parts, usual, reason)

    @abstractmethod
    def _hand_over(self, gradients: Sequence[Tensor], image: Tensor) -> None:
        """Exchanges ready gradients, one for each parameter; image: one sample [1, …]."""

    def _finish(self) -> None:
        """Makes the sum after the backward pass, where it is not made during it."""

    def _unsent(self) -> AbstractContextManager:
        """Within it, a backward pass adds to the gradients and sends nothing."""
        return nullcontext()

    def _learn_whole(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        outputs, loss = self._forward(self.model, images, labels)
        self._balancer.clock.mark("forward")
        loss.backward()
        self._finish()
        return outputs.detach(), loss.detach()

    def _learn_accumulating(
        self, parts: int, images: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """In micro-batches, of which the last sends the gradients of all; no forward is marked."""
        outputs, total = [], torch.zeros((), device=images.device, dtype=torch.float64)
        pieces = zip(images.tensor_split(parts), labels.tensor_split(parts))
        self._kept_back = None
        for number, (inputs, targets) in enumerate(pieces, 1):
            with nullcontext() if number == parts else self._unsent():
                guesses, loss = self._forward(self.model, inputs, targets)
                loss = loss * (len(inputs) / len(images))
                if number == parts:
                    given = [p for p in self._module.parameters() if p.grad is not None]
                    self._kept_back = [(p, p.grad, p.grad._version) for p in given]
                loss.backward()
            outputs.append(guesses.detach())
            total += loss.detach()
        self._kept_back = []
        self._finish()
        return torch.cat(outputs), total

    def _learn_apart(self, parts: int, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The same gradient from micro-batches, made apart from the exchange and handed over."""
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        gradients = [torch.zeros_like(parameter) for parameter in parameters]
        outputs, total = [], torch.zeros((), device=images.device, dtype=torch.float64)
        for inputs, targets in zip(images.tensor_split(parts), labels.tensor_split(parts)):
            guesses, loss = self._forward(self._module, inputs, targets)
            loss = loss * (len(inputs) / len(images))
            for gradient, more in zip(gradients, torch.autograd.grad(loss, parameters)):
                gradient += more
            outputs.append(guesses.detach())
            total += loss.detach()
        self._hand_over(gradients, images[:1])
        return torch.cat(outputs), total

    def _drop_kept_back(self) -> None:
        """After a step broke off: forgets the gradients that the last backward pass has not met."""
        if self._kept_back is None:
            self._module.zero_grad()
        for parameter, gradient, version in self._kept_back or ():
            if parameter.grad is gradient and gradient._version == version:
                parameter.grad = None
        self._kept_back = []

    def _more_parts(self, samples: int, parts: int, usual: int, reason: str) -> int:
        if parts >= samples:
            raise UserError(
                f"out of memory with a single sample at step {self._balancer.next_step} "
                f"({reason}): take a smaller model or image, or leave this rank out"
            )
        self._balancer.announce_cap(max(1, int(_CAP * usual * -(-samples // parts))))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return min(2 * parts, samples)


class DdpExchange(Exchange):
    """By DistributedDataParallel: each bucket of gradients leaves as soon as it is ready."""

    def __init__(self, module: nn.Module, balancer: Balancer, *arguments: Any) -> None:
        super().__init__(module, balancer, *arguments)
        self.model = wrap(module)
        balancer.attach(self.model)

    def _hand_over(self, gradients: Sequence[Tensor], image: Tensor) -> None:
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        # A backward pass that broke off cannot be begun again, but it can be finished: the
        # gradients it had made are whole, DDP has counted them, and buckets may have left.
        missing = [pair for pair in zip(parameters, gradients) if pair[0].grad is None]
        if len(missing) == len(parameters):
            # A forward pass makes DDP ready to send. In evaluation mode it leaves no other trace.
            self._module.eval()
            self.model(image)
            self._module.train()
        # The gradient of this sum is `gradients`: DDP's hooks see them come, bucket by bucket.
        torch.autograd.backward(*zip(*missing))

    def _unsent(self) -> AbstractContextManager:
        return self.model.no_sync()


class FlatExchange(Exchange):
    """By one all-reduce of all gradients after the backward pass."""

    def __init__(self, module: nn.Module, balancer: Balancer, *arguments: Any) -> None:
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


class HorovodExchange(Exchange):
    """By Horovod: each gradient leaves as soon as it is ready, and Horovod fuses small ones.

    Only the gradients travel over Horovod. Not its DistributedOptimizer: that weights all workers
    alike, does not tell when a worker's last gradient is ready, and steps the optimizer itself. Nor
    its prescale_factor, which may not differ between workers: the gradient is multiplied first.
    """

    def __init__(self, module: nn.Module, balancer: Balancer, *arguments: Any) -> None:
        super().__init__(module, balancer, *arguments)
        self._horovod = horovod_library.load()
        self._check_device(next(module.parameters()).device)
        broadcast_state(module)
        self.model = module
        self._named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        # Of the gradients that have been sent in this step, by the name of the parameter.
        self._handles: dict[str, int] = {}
        self._sends = True
        for name, parameter in self._named:
            parameter.register_post_accumulate_grad_hook(partial(self._send, name))

    def _check_device(self, device: torch.device) -> None:
        if device.type == "cuda" and not self._horovod.cuda_built():
            raise UserError(
                "exchange: this Horovod was built for CPUs alone: use --device cpu, or build it "
                "again with HOROVOD_GPU_OPERATIONS=NCCL scripts/install_horovod.sh"
            )

    def _send(self, name: str, parameter: nn.Parameter) -> None:
        """Called for each parameter in each backward pass, as soon as its gradient is there."""
        if not self._sends:
            return
        is_last = len(self._handles) + 1 == len(self._named)
        self._balancer.bucket_ready(parameter.grad, is_last)
        flat = _in_memory_order(parameter.grad)
        self._handles[name] = self._horovod.allreduce_async_(
            flat, name=name, op=self._horovod.Sum
        )

    def _hand_over(self, gradients: Sequence[Tensor], image: Tensor) -> None:
        for (name, parameter), gradient in zip(self._named, gradients):
            # What a backward pass that broke off has sent is on its way, and right.
            if name not in self._handles:
                parameter.grad = gradient
                self._send(name, parameter)
        self._finish()

    @contextmanager
    def _unsent(self) -> Iterator[None]:
        self._sends = False
        try:
            yield
        finally:
            self._sends = True

    def _finish(self) -> None:
        handles, self._handles = self._handles, {}
        for name, handle in handles.items():
            horovod_library.wait(handle, name)
            self._balancer.bucket_summed()


def _in_memory_order(tensor: Tensor) -> Tensor:
    """A flat view of a dense tensor; Horovod takes contiguous ones alone, not channels-last."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).view(-1)


EXCHANGES = {"ddp": DdpExchange, "flat": FlatExchange, "horovod": HorovodExchange}
