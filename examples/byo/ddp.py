"""A small network on handwritten digits with plain DDP, as torchrun starts it; it resumes from its file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    arguments = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else torch.device("cpu")
    distributed.init_process_group("nccl" if is_cuda else "gloo")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    net.to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    first = 0
    if arguments.checkpoint.exists():
        saved = torch.load(arguments.checkpoint, map_location="cpu", weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
    model = DistributedDataParallel(net)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 32, sampler=sampler)
    for epoch in range(first, arguments.epochs):
        sampler.set_epoch(epoch)
        for images, targets in loader:
            loss = torch.nn.functional.cross_entropy(model(images.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if distributed.get_rank() == 0:
            save(arguments.checkpoint, net, optimizer, epoch)
            world = distributed.get_world_size()
            print(f"epoch {epoch + 1} of {world} workers: loss {loss.item():.4f}", flush=True)
    distributed.destroy_process_group()


def save(path: Path, net: torch.nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Whole or not at all."""
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


if __name__ == "__main__":
    main()
