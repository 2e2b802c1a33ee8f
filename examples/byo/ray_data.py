"""A small network on handwritten digits with Ray Train and Ray Data, as tutorials write it."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import ray
import ray.data
import ray.train
import ray.train.torch
import torch
from sklearn.datasets import load_digits


def train(config: dict[str, Any]) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt", map_location="cpu", weights_only=True)
        net.load_state_dict(saved["model"])
        first = saved["epoch"] + 1
    model = ray.train.torch.prepare_model(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    shard = ray.train.get_dataset_shard("train")
    for epoch in range(first, config["epochs"]):
        losses = []
        for batch in shard.iter_torch_batches(batch_size=32, drop_last=True):
            loss = torch.nn.functional.cross_entropy(model(batch["pixels"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        metrics = {"epoch": epoch, "loss": sum(losses) / len(losses)}
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
    arguments = parser.parse_args()
    ray.init()
    pixels, labels = load_digits(return_X_y=True)
    table = pyarrow.table({"pixels": list((pixels / 16).astype(np.float32)), "label": labels})
    result = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"epochs": arguments.epochs},
        scaling_config=ray.train.ScalingConfig(
            num_workers=arguments.num_workers, use_gpu="GPU" in ray.cluster_resources()
        ),
        run_config=ray.train.RunConfig(name="tutorial", storage_path=arguments.storage_path),
        datasets={"train": ray.data.from_arrow(table)},
    ).fit()
    print(f"loss {result.metrics['loss']:.3f} after {result.metrics['epoch'] + 1} epochs")
