"""ResNet-18 on handwritten digits in colour with Ray Train and a DataLoader, as tutorials write it."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18


def digits() -> TensorDataset:
    """Images of 3x16x16 in [0, 1]."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    pixels = torch.nn.functional.interpolate(pixels, 16).expand(-1, 3, -1, -1)
    return TensorDataset(pixels, torch.tensor(labels))


def train(config: dict[str, Any]) -> None:
    net = resnet18(num_classes=10)
    model = ray.train.torch.prepare_model(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.1)
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt", map_location="cpu", weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first = saved["epoch"] + 1
    batches = ray.train.torch.prepare_data_loader(
        DataLoader(digits(), 32, shuffle=True, drop_last=True)
    )
    for epoch in range(first, config["epochs"]):
        if ray.train.get_context().get_world_size() > 1:
            batches.sampler.set_epoch(epoch)
        right = count = 0
        for images, labels in batches:
            scores = model(images)
            loss = torch.nn.functional.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += (scores.argmax(1) == labels).sum().item()
            count += len(labels)
        schedule.step()
        metrics = {"epoch": epoch, "loss": loss.item(), "accuracy": right / count}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                state = {
                    "model": net.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "schedule": schedule.state_dict(),
                    "epoch": epoch,
                }
                torch.save(state, Path(folder) / "state.pt")
                checkpoint = ray.train.Checkpoint.from_directory(folder)
                print(metrics, flush=True)
            ray.train.report(metrics, checkpoint=checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--storage-path", default=None)
    arguments = parser.parse_args()
    ray.init()
    result = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"epochs": arguments.epochs},
        scaling_config=ray.train.ScalingConfig(
            num_workers=arguments.num_workers, use_gpu="GPU" in ray.cluster_resources()
        ),
        run_config=ray.train.RunConfig(name="resnet18", storage_path=arguments.storage_path),
    ).fit()
    print(f"accuracy {result.metrics['accuracy']:.3f} after {result.metrics['epoch'] + 1} epochs")
