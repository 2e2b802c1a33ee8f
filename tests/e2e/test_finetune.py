"""Fine-tuning on the cluster: a model on a volume, on a hub and in a bucket; pods that are killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bucket import Bucket, address_of_node, secret
from conftest import ROOT, Team, get, kubectl, run, wait_for
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.support.hub_server import TOKEN, Hub, running_hub
from tests.support.tiny_models import make_folder
from tests.trainer.causal_runs import write_chats

RUN: dict[str, Any] = {
    "name": "chat",
    "resources": {"workers": 2},
    "volumes": ["base"],
    "data": {"source": "s3://runs/data/chats.jsonl"},
    "train": {
        "recipe": "causal_lm",
        "model": {
            "path": "/data/base",
            "adapter": {"kind": "lora", "rank": 4, "alpha": 8, "dropout": 0.1},
        },
        "context_length": 64,
        "epochs": 40,
        "global_batch_size": 8,
        "optimizer": {"name": "adamw", "learning_rate": 0.005},
    },
    "checkpoint": {"every_samples": 200},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is small enough for a ConfigMap."""
    folder = tmp_path_factory.mktemp("base") / "base"
    return make_folder(folder, vocab_size=600, width=32, layers=1)


@pytest.fixture(scope="module")
def team(
    make_team: Callable[[str], Team],
    bucket: Bucket,
    base: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Team:
    team = make_team("finetune")
    kubectl("create", "configmap", "base", f"--from-file={base}", "-n", team.namespace)
    volume = {"configMap": {"name": "base"}, "mountPath": "/data/base"}
    values = tmp_path_factory.mktemp("values")
    bucket.give_to(
        team,
        values,
        data={"volumes": {"base": volume}},
        runs={"secrets": ["hub"]},
    )
    data = bucket.folder.parent / "data"
    data.mkdir()
    write_chats(data / "chats.jsonl", count=300)
    return team


def test_an_adapter_survives_the_head_and_is_exported_and_merged(
    team: Team, bucket: Bucket, base: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(json.dumps(RUN))
    ended = team.trainyard("submit", str(tmp_path / "run.yaml"), "--detach")
    assert ended.returncode == 0, ended.stderr
    checkpoints = bucket.folder / "chat/checkpoints"
    wait_for("the run saves", lambda: list(checkpoints.glob("*/manifest.json")))
    head = team.pods(node_type="head")[0]["metadata"]["name"]
    kubectl("delete", "pod", head, "-n", team.namespace, "--grace-period=0", "--force")
    ended = team.trainyard("watch", "chat")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = team.status("chat")["summary"]
    assert summary["outcome"] == "succeeded"
    assert summary["resumed_from"] is not None

    folder = str(bucket.folder / "chat")
    for name, more in (("adapter", ()), ("merged", ("--merge",))):
        export = ("checkpoints", "export", folder, "--base-model", str(base), *more)
        ended = run(ROOT / ".venv/bin/trainyard", *export, "--out", str(tmp_path / name))
        assert ended.returncode == 0, ended.stderr
    tokens = torch.randint(4, 500, (2, 20))
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter"
        )(tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(tokens).logits
        plain = AutoModelForCausalLM.from_pretrained(base)(tokens).logits
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-5)
    assert (merged - plain).abs().max() > 0.01


SHARDED = RUN | {
    "train": RUN["train"] | {"strategy": "fsdp2", "epochs": 20},
    "checkpoint": {"every_samples": 200},
}
"""A run of all weights, of which each worker holds a part."""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files of weights."""
    folder = make_folder(
        tmp_path_factory.mktemp("sharded") / "model", max_shard_size="150KB", vocab_size=600
    )
    assert len(weights_of(folder)) > 1
    return folder


def weights_of(model: Path) -> list[str]:
    return [file.name for file in model.glob("*.safetensors")]


@pytest.fixture
def hub(sharded: Path) -> Iterator[Hub]:
    """A hub with that model, which only a token gives."""
    with running_hub(address_of_node()) as hub:
        hub.private = True
        hub.publish("org/tiny", sharded)
        yield hub


def test_a_private_model_of_a_hub_is_fetched_by_each_node_and_sharded_and_survives_a_worker(
    team: Team, bucket: Bucket, sharded: Path, hub: Hub, tmp_path: Path
) -> None:
    secret(team, "hub", token=TOKEN)
    train = SHARDED["train"] | {"model": {"path": "hf://org/tiny"}}
    document = SHARDED | {
        "name": "hub",
        "volumes": [],
        "env": {"HF_ENDPOINT": hub.endpoint},
        "secrets": {"HF_TOKEN": {"name": "hub", "key": "token"}},
        "train": train,
    }
    survives_a_worker(team, bucket, document, sharded, tmp_path)
    # Two nodes, and the one that came for the lost one.
    assert {hub.fetched.count(file) for file in weights_of(sharded)} == {3}
    base = json.loads((bucket.folder / "hub/base_model.json").read_text())
    assert base["path"] == f"hf://org/tiny@{1:040x}"


@pytest.mark.full
def test_a_model_in_a_bucket_is_fetched_and_sharded_and_survives_a_worker(
    team: Team, bucket: Bucket, sharded: Path, tmp_path: Path
) -> None:
    shutil.copytree(sharded, bucket.folder.parent / "models/tiny")
    train = SHARDED["train"] | {"model": {"path": "s3://runs/models/tiny"}}
    document = SHARDED | {"name": "bucket", "volumes": [], "train": train}
    survives_a_worker(team, bucket, document, sharded, tmp_path)


def survives_a_worker(
    team: Team, bucket: Bucket, document: dict[str, Any], base: Path, folder: Path
) -> None:
    """Train, lose the pod of a worker after a checkpoint, and check what is exported in the end."""
    name = document["name"]
    (folder / "run.yaml").write_text(json.dumps(document))
    ended = team.trainyard("submit", str(folder / "run.yaml"), "--detach")
    assert ended.returncode == 0, ended.stderr
    checkpoints = bucket.folder / name / "checkpoints"
    wait_for("the run saves", lambda: list(checkpoints.glob("*/manifest.json")))
    selector = f"trainyard.io/run={name},ray.io/node-type=worker"
    worker = get("pods", team.namespace, "-l", selector)["items"][0]["metadata"]["name"]
    kubectl("delete", "pod", worker, "-n", team.namespace, "--grace-period=0", "--force")
    ended = team.trainyard("watch", name)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = team.status(name)["summary"]
    assert (summary["outcome"], summary["attempts"]) == ("succeeded", 1)
    starts = (bucket.folder / name / "starts.jsonl").read_text().splitlines()
    assert {json.loads(line)["group"] for line in starts} == {1, 2}, "the workers restarted once"

    export = ("checkpoints", "export", str(bucket.folder / name), "--out", str(folder / "model"))
    ended = run(ROOT / ".venv/bin/trainyard", *export, "--base-model", str(base))
    assert ended.returncode == 0, ended.stderr
    tokens = torch.randint(4, 500, (2, 20))
    with torch.no_grad():
        trained = AutoModelForCausalLM.from_pretrained(folder / "model")(tokens).logits
        plain = AutoModelForCausalLM.from_pretrained(base)(tokens).logits
    assert torch.isfinite(trained).all()
    assert (trained - plain).abs().max() > 0.01
