"""The script of plain_script.py, balanced: each worker gets a batch that suits its speed.

    torchrun --standalone --nproc_per_node=2 examples/own_script.py

Install the two modules it needs with `pip install .` in the project's folder.
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from balancer import Balancer, wrap

BATCH_SIZE, EPOCHS = 256, 5


def make_dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(8192, 64, generator=draw)
    return TensorDataset(inputs, (inputs[:, :8].sum(1) > 0).long())


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dataset = make_dataset()
    balancer = Balancer(len(dataset), BATCH_SIZE)
    loader = DataLoader(dataset, batch_sampler=balancer.sampler)
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2))
    model = wrap(network)
    balancer.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        start = time.perf_counter()
        for inputs, labels in balancer.steps(loader, epoch):
            time.sleep(0.0001 * len(inputs) * (1 + 3 * rank))  # rank 1 is four times slower
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch}: {time.perf_counter() - start:.2f} s, loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
