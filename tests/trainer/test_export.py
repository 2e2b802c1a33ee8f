"""A model for other programs says of images what the run's own model says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_torch import asked

from tests.trainer.saved_run import config_of, damage, open_small, save, weights_of
from trainyard_trainer.checkpointing.checkpoint import Checkpoints
from trainyard_trainer.config.training.models import Model
from trainyard_trainer.errors import ConfigError, RunError
from trainyard_trainer.recipes.image_classification.model import build_model
from trainyard_trainer.recipes.saved_model import deliver, read_saved
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.tools import export


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run of two epochs that has delivered its first."""
    folder = open_small(tmp_path)
    for epoch, accuracy in ((1, 0.9), (2, 0.8)):
        save(folder, epoch, accuracy=accuracy, weights=weights_of(epoch))
    checkpoints = Checkpoints(folder)
    deliver(folder, checkpoints, checkpoints.read_manifest(checkpoints.names()[-1]))
    return folder


def exported(folder: RunFolder, out: Path, *options: str) -> dict[str, Any]:
    """Write a model to a file; returns what lies beside it."""
    assert export.main([folder.root, "--out", str(out), *options]) == 0
    return json.loads(Path(f"{out}.json").read_text())


def images(count: int = 5) -> torch.Tensor:
    return torch.randn(count, 1, 16, 16, generator=torch.Generator().manual_seed(1))


def scores(network: Any) -> torch.Tensor:
    with torch.inference_mode():
        return network(images())


def test_a_plain_state_dict_is_all_that_torch_needs(folder: RunFolder, tmp_path: Path) -> None:
    facts = exported(folder, tmp_path / "model.pt")
    network = build_model(Model.model_validate(facts["model"])).eval()
    network.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(scores(network), scores(read_saved(folder, "delivered").build()))


def test_what_a_program_must_know_lies_beside_the_model(folder: RunFolder, tmp_path: Path) -> None:
    facts = exported(folder, tmp_path / "model.pt")
    assert facts["format"] == "state_dict"
    assert (facts["run"], facts["checkpoint"]) == ("small", "s000000000100-a1.1")
    assert facts["input"] == {"shape": [None, 1, 16, 16], "dtype": "float32"}
    assert facts["images"]["classes"] == ["zero", "one", "two"]
    assert (facts["images"]["mean"], facts["images"]["std"]) == ([0.3], [0.4])
    assert facts["model"]["name"] == "shufflenet_v2_x0_5"
    assert facts["trained"]["samples"] == 100
    assert facts["trained"]["val_accuracy"] == 0.9
    assert len(facts["preprocessing"]) == 4


def test_in_mid_epoch_no_accuracy_is_told(tmp_path: Path) -> None:
    folder = open_small(tmp_path)
    save(folder, 1, steps_in_epoch=3, weights=weights_of(1))
    facts = exported(folder, tmp_path / "model.pt", "--checkpoint", "last")
    assert facts["trained"] == {
        **{"epoch": 1, "step": 13, "samples": 130},
        **{"val_accuracy": None, "val_loss": None},
    }


@pytest.mark.parametrize(
    ("which", "epoch"),
    [
        ("delivered", 1),
        ("last", 2),
        ("best", 1),
        ("s000000000200-a1.1", 2),
    ],
)
def test_each_checkpoint_can_be_taken(
    folder: RunFolder, tmp_path: Path, which: str, epoch: int
) -> None:
    facts = exported(folder, tmp_path / "model.pt", "--checkpoint", which)
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert facts["trained"]["epoch"] == epoch
    assert all(torch.equal(weights[name], value) for name, value in weights_of(epoch).items())


def test_the_moving_average_is_what_counts_where_there_is_one(tmp_path: Path) -> None:
    folder = open_small(tmp_path)
    average = weights_of(7)
    name = save(folder, 1, weights=weights_of(1), average=average, config=config_of(ema_decay=0.99))
    facts = exported(folder, tmp_path / "model.pt", "--checkpoint", name)
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert facts["weights"] == "moving average"
    assert weights.keys() == average.keys()
    assert all(torch.equal(weights[key], value) for key, value in average.items())


@pytest.mark.parametrize(
    ("kind", "suffix"), [("torchscript", "ts"), pytest.param("pt2", "pt2", marks=pytest.mark.ci)]
)
def test_torch_alone_loads_the_network_for_any_number_of_images(
    folder: RunFolder,
    tmp_path: Path,
    recwarn: pytest.WarningsRecorder,
    kind: str,
    suffix: str,
) -> None:
    file = tmp_path / f"model.{suffix}"
    exported(folder, file, "--format", kind)
    assert not [str(warning.message) for warning in recwarn.list]
    inputs = [images(1), images(5)]
    network = read_saved(folder, "delivered").build()
    with torch.inference_mode():
        torch.testing.assert_close(asked(file, inputs), [network(each) for each in inputs])


@pytest.mark.ci
def test_onnx_says_the_same(folder: RunFolder, tmp_path: Path) -> None:
    from onnx.reference import ReferenceEvaluator

    exported(folder, tmp_path / "model.onnx", "--format", "onnx")
    session = ReferenceEvaluator(str(tmp_path / "model.onnx"))
    found = scores(lambda images: session.run(None, {"images": images.numpy()})[0])
    wanted = scores(read_saved(folder, "delivered").build())
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


def test_without_its_packages_onnx_is_refused_with_the_remedy(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"onnx, onnxscript\n.*pip install 'trainyard\[export\]'"):
        exported(folder, tmp_path / "model.onnx", "--format", "onnx")
    assert not (tmp_path / "model.onnx").exists()


def test_by_default_a_model_lies_in_the_runs_folder(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export.main([folder.root])
    model = f"{folder.root}/export/small-s000000000100-a1.1.pt"
    assert capsys.readouterr().out == f"{model}\n{model}.json\n"
    export.main([folder.root, "--out", str(tmp_path)])
    assert (tmp_path / Path(model).name).read_bytes() == Path(model).read_bytes()


def test_a_model_goes_to_every_storage(storage: tuple[str, str | None]) -> None:
    path, endpoint = storage
    folder = RunFolder.open(path, "small", endpoint)
    save(folder, 1, weights=weights_of(1))
    address = ["--endpoint", endpoint] if endpoint else []
    export.main(["small", "--storage", path, "--checkpoint", "last", *address])
    export.main(
        [f"{path}/small", "--checkpoint", "last", "--out", f"{path}/elsewhere/model.pt", *address]
    )
    there = RunFolder.open(path, "elsewhere", endpoint)
    own = f"{folder.root}/export/small-s000000000100-a1.1.pt"
    assert there.read(f"{there.root}/model.pt") == folder.read(own)
    assert json.loads(there.read(f"{there.root}/model.pt.json"))["run"] == "small"


def test_a_checkpoint_that_is_not_there_is_told(folder: RunFolder) -> None:
    with pytest.raises(ConfigError, match="--checkpoint = s1: there is none"):
        export.main([folder.root, "--checkpoint", "s1"])


def test_a_damaged_checkpoint_is_not_exported(folder: RunFolder) -> None:
    newest = Checkpoints(folder).names()[0]
    damage(folder, newest)
    with pytest.raises(RunError, match="SHA-256 differs"):
        export.main([folder.root, "--checkpoint", newest])


def test_a_run_that_has_delivered_nothing_says_what_can_be_had(tmp_path: Path) -> None:
    folder = open_small(tmp_path)
    save(folder, 1)
    with pytest.raises(RunError, match=r"not delivered a model yet.*\n.*--checkpoint last"):
        export.main([folder.root])
