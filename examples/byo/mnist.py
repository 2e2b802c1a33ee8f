"""A convolutional network on MNIST with Ray Train and a DataLoader, as tutorials write it.

Nothing is downloaded: where the folder --data has no MNIST, scikit-learn's digits are grown to its size.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy
import ray
import ray.train
import ray.train.torch
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.datasets import MNIST


def digits(folder: Path, train: bool) -> TensorDataset:
    """Grey images of 1x28x28 in [0, 1]."""
    if (folder / "MNIST/raw").exists():
        found = MNIST(folder, train)
        return TensorDataset(found.data.unsqueeze(1) / 255, found.targets)
    images, labels = load_digits(return_X_y=True)
    chosen = (numpy.arange(len(labels)) % 5 != 0) == train
    pixels = torch.tensor(images[chosen], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return TensorDataset(nn.functional.interpolate(pixels, 28), torch.tensor(labels[chosen]))


def train(config: dict[str, Any]) -> None:
    net = nn.Sequential(
        *(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10)),
    )
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt", map_location="cpu", weights_only=True)
        net.load_state_dict(saved["model"])
        first = saved["epoch"] + 1
    model = ray.train.torch.prepare_model(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = Path(config["data"])
    batches = DataLoader(digits(data, train=True), 32, shuffle=True)
    batches = ray.train.torch.prepare_data_loader(batches)
    tests = ray.train.torch.prepare_data_loader(
        DataLoader(digits(data, train=False), 256), add_dist_sampler=False
    )
    for epoch in range(first, config["epochs"]):
        if ray.train.get_context().get_world_size() > 1:
            batches.sampler.set_epoch(epoch)
        for images, labels in batches:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = sum((net(images).argmax(1) == labels).sum().item() for images, labels in tests)
        metrics = {"epoch": epoch, "loss": loss.item(), "accuracy": right / len(tests.dataset)}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                state = {"model": net.state_dict(), "epoch": epoch}
                torch.save(state, Path(folder) / "state.pt")
                checkpoint = ray.train.Checkpoint.from_directory(folder)
                print(metrics, flush=True)
            ray.train.report(metrics, checkpoint=checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--storage-path", default=None)
    parser.add_argument("--data", type=Path, default=Path("data"))
    arguments = parser.parse_args()
    ray.init()
    result = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"epochs": arguments.epochs, "data": str(arguments.data.absolute())},
        scaling_config=ray.train.ScalingConfig(
            num_workers=arguments.num_workers, use_gpu="GPU" in ray.cluster_resources()
        ),
        run_config=ray.train.RunConfig(name="mnist", storage_path=arguments.storage_path),
    ).fit()
    print(f"accuracy {result.metrics['accuracy']:.3f} after {result.metrics['epoch'] + 1} epochs")
