"""ResNet-18 on handwritten digits with Ray Train and a DataLoader; a retry goes on from the last epoch."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy
import ray
import ray.train
import ray.train.torch
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

from trainyard_trainer import run_config


def digits(train: bool) -> TensorDataset:
    """Grey images of 1x8x8 in [0, 1]; each fifth is for validation."""
    images, labels = load_digits(return_X_y=True)
    chosen = (numpy.arange(len(labels)) % 5 != 0) == train
    pixels = torch.tensor(images[chosen], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return TensorDataset(pixels, torch.tensor(labels[chosen]))


def train(config: dict) -> None:
    net = resnet18(num_classes=10)
    net.conv1 = torch.nn.Conv2d(1, 64, 3, padding=1, bias=False)
    model = ray.train.torch.prepare_model(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt", map_location="cpu", weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
        print(f"going on with epoch {first}", flush=True)
    loader = ray.train.torch.prepare_data_loader(DataLoader(digits(train=True), 32, shuffle=True))
    for epoch in range(first, config["epochs"]):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        metrics = {"epoch": epoch, "loss": loss.item(), "accuracy": accuracy(net)}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                state = {
                    "model": net.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "epoch": epoch,
                }
                torch.save(state, Path(folder) / "state.pt")
                checkpoint = ray.train.Checkpoint.from_directory(folder)
                print(metrics, flush=True)
            ray.train.report(metrics, checkpoint=checkpoint)


@torch.no_grad()
def accuracy(net: torch.nn.Module) -> float:
    device = ray.train.torch.get_device()
    images, labels = (part.to(device) for part in digits(train=False).tensors)
    net.eval()
    right = (net(images).argmax(1) == labels).float().mean().item()
    net.train()
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    ray.init()
    result = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"epochs": arguments.epochs},
        scaling_config=ray.train.ScalingConfig(
            num_workers=arguments.num_workers, use_gpu="GPU" in ray.cluster_resources()
        ),
        run_config=run_config(),
    ).fit()
    print(f"accuracy {result.metrics['accuracy']:.3f} after {result.metrics['epoch'] + 1} epochs")
