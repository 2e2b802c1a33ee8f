"""Images are read and decoded on the nodes that have the labels for it, and nowhere else."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import ray
import torch
from loaders import config_of, prepared_of
from own_recipes import own_config, task_of_code
from ray.cluster_utils import Cluster

from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.data.loading import ray_source
from trainyard_trainer.data.loading.ray_source import STORE_SHARE
from trainyard_trainer.data.loading.remaining import RemainingSamples
from trainyard_trainer.on_ray.sample_tasks import SampleBatches
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder.measurements.progress import Length, Trained

LABELS = {"ray-subcluster": "data"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data_node() -> Iterator[str]:
    """Its id. The node where the test runs has CPUs, too."""
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "RAY_AUTH_MODE": "disabled",
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    }
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        for name, value in environment.items():
            patch.setenv(name, value)
        node = {"include_dashboard": False, "object_store_memory": 2**27}
        cluster = Cluster(
            initialize_head=True,
            head_node_args={**node, "num_cpus": 2, "temp_dir": f"{scratch}/ray"},
        )
        added = cluster.add_node(**node, num_cpus=1, labels=LABELS)
        ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        yield added.node_id
        ray.shutdown()
        cluster.shutdown()


def nodes_of_tasks(folder: Path, config: TrainerConfig) -> list[str]:
    """Where the tasks ran, of a data set that is split among two workers as in training."""
    prepared = prepared_of(folder, 97)
    length = Length.of(config, 97)
    work = RemainingSamples(prepared, length, Trained(), np.zeros(97, bool), 1, config)
    ray_source.configure(config)

    def with_node(table: pa.Table) -> pa.Table:
        node = ray.get_runtime_context().get_node_id()
        return pa.table({"node": [node], "rows": [len(table)]})

    dataset = ray_source.read(work, np.arange(97), seed=[0])
    tasks = dataset.map_batches(with_node, batch_size=None, batch_format="pyarrow")
    (shard,) = tasks.streaming_split(1, equal=True)
    found = list(shard.iter_batches(batch_size=None, batch_format="pyarrow"))
    assert sum(sum(table["rows"].to_pylist()) for table in found) == 97
    return [node for table in found for node in table["node"].to_pylist()]


def test_tasks_keep_to_the_nodes_with_the_labels(tmp_path: Path, data_node: str) -> None:
    config = config_of(tmp_path, 12, data__loader="ray", data__ray_nodes=LABELS)
    assert set(nodes_of_tasks(tmp_path, config)) == {data_node}


RECIPE = """
import ray
import torch
from trainyard_trainer import Recipe

class Where:
    def __init__(self, split):
        pass

    def __len__(self):
        return 40

    def __getitem__(self, index):
        node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else "00"
        return {"node": torch.tensor(list(bytes.fromhex(node)))}

class Reader(Recipe):
    def build_model(self):
        raise NotImplementedError

    def loss(self, model, batch):
        raise NotImplementedError
"""


def test_a_data_set_of_the_user_is_read_on_the_nodes_with_the_labels(
    code: Path, tmp_path: Path, data_node: str
) -> None:
    (code / "where.py").write_text(RECIPE)
    config = own_config(tmp_path, recipe="where:Reader", dataset="where:Where")
    data = config.data.model_copy(update={"loader": "ray", "ray_nodes": LABELS})
    task = task_of_code(code, config.model_copy(update={"data": data}))
    length = Length.of(config, 40)
    batches = SampleBatches(task, length, Trained(), Worker(device=torch.device("cpu")))
    found = torch.cat([batch["node"] for batch in batches.epoch(0)])
    assert {bytes(each.tolist()).hex() for each in found} == {data_node}


def test_a_run_may_fill_its_share_of_the_object_store(tmp_path: Path, data_node: str) -> None:
    ray_source.configure(config_of(tmp_path, 12, data__loader="ray"))
    limits = ray.data.DataContext.get_current().execution_options.resource_limits
    assert limits.object_store_memory == STORE_SHARE * 2 * 2**27
