"""A plain DistributedDataParallel script: what many people's training looks like.

    torchrun --standalone --nproc_per_node=2 examples/plain_script.py

own_script.py beside it is the same script, balanced.
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH_SIZE, EPOCHS = 256, 5


def make_dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(8192, 64, generator=draw)
    return TensorDataset(inputs, (inputs[:, :8].sum(1) > 0).long())


def main() -> None:
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    dataset = make_dataset()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, BATCH_SIZE // workers, sampler=sampler)
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        start = time.perf_counter()
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
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
