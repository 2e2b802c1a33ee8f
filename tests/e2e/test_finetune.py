"""Fine-tuning on the cluster: a model on a volume, data in a bucket, and a head that is killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bucket import Bucket
from conftest import ROOT, Team, kubectl, run, wait_for
from peft import PeftModel
from transformers import AutoModelForCausalLM

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
    bucket.give_to(team, values, data={"volumes": {"base": volume}})
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
