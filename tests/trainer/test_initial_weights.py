"""Initial weights are read from safetensors and state_dicts, and compared before workers start."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from s3_server import Bucket
from safetensors.torch import save_file
from torch import nn
from training import (
    final_weights,
    run_processes,
    same,
    small_config,
    train_and_tell,
    train_here,
)

from tests.support.hub_server import Hub, running_hub
from trainyard_trainer.attempt.checks import check_start
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.train import InitialWeights
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.initial_weights import (
    check_initial_weights,
    load_initial_weights,
    note_weights,
    pinned_weights,
)
from trainyard_trainer.recipes.registry import recipe_of
from trainyard_trainer.run_folder.folder import RunFolder


def network() -> nn.Module:
    """A trunk and a head, whose names are those of many models."""
    return nn.ModuleDict({"trunk": nn.Linear(4, 3), "head": nn.Linear(3, 2)})


class Tied(nn.Module):
    """A model that uses one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.output = nn.Linear(3, 5, bias=False)
        self.output.weight = self.embedding.weight


def init_of(path: Path, **settings: Any) -> InitialWeights:
    return InitialWeights.model_validate({"path": str(path)} | settings)


def load(init: InitialWeights, model: nn.Module) -> nn.Module:
    load_initial_weights(init, None, model)
    return model


WRITERS: dict[str, Callable[[dict[str, torch.Tensor], Path], None]] = {
    "model.safetensors": save_file,
    "model.pt": torch.save,
    "model.pth": lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
}


@pytest.mark.parametrize("name", WRITERS)
def test_each_format_gives_the_weights_that_were_saved(tmp_path: Path, name: str) -> None:
    saved, model = network(), network()
    WRITERS[name](saved.state_dict(), tmp_path / name)
    assert not same(model.state_dict(), saved.state_dict())
    assert same(load(init_of(tmp_path / name), model).state_dict(), saved.state_dict())


def test_a_file_of_half_precision_fills_a_model_of_full_precision(tmp_path: Path) -> None:
    saved = network().to(torch.bfloat16)
    save_file(saved.state_dict(), tmp_path / "m.safetensors")
    model = load(init_of(tmp_path / "m.safetensors"), network())
    assert same(model.state_dict(), saved.float().state_dict())


def test_names_are_found_below_a_key_and_behind_a_prefix(tmp_path: Path) -> None:
    saved = network()
    state = {f"module.{name}": value for name, value in saved.state_dict().items()}
    torch.save({"epoch": 3, "model": state}, tmp_path / "m.pt")
    model = load(init_of(tmp_path / "m.pt", key="model", prefix="module."), network())
    assert same(model.state_dict(), saved.state_dict())


def test_a_tensor_that_the_model_uses_twice_may_be_once_in_the_file(tmp_path: Path) -> None:
    saved = Tied()
    save_file({"embedding.weight": saved.embedding.weight.detach()}, tmp_path / "m.safetensors")
    model = load(init_of(tmp_path / "m.safetensors"), Tied())
    assert same(model.state_dict(), saved.state_dict())


def test_what_is_skipped_stays_random_and_is_told(tmp_path: Path) -> None:
    saved = nn.ModuleDict({"trunk": nn.Linear(4, 3), "head": nn.Linear(3, 1000)})
    torch.save(saved.state_dict(), tmp_path / "m.pt")
    init, model = init_of(tmp_path / "m.pt", skip=["head.*"]), network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert check_initial_weights(init, None, model).random == ("head.weight", "head.bias")
    after = load(init, model).state_dict()
    assert torch.equal(after["head.weight"], before["head.weight"])
    assert torch.equal(after["trunk.weight"], saved.state_dict()["trunk.weight"])


def altered(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The state of the network with other tensors; without those that are None."""
    state = network().state_dict() | {
        name.replace("_", "."): value for name, value in changes.items()
    }
    return {name: value for name, value in state.items() if value is not None}


@pytest.mark.parametrize(
    ("state", "settings", "problem"),
    [
        (
            altered(head_weight=torch.zeros(7, 3)),
            {},
            r"1 tensors have another shape: head.weight \(2, 3\) in the model, \(7, 3\) in the file.*"
            r"train.init.skip",
        ),
        (
            altered(head_bias=None),
            {},
            r"1 tensors are missing in the file: head.bias \(there is head.weight\)",
        ),
        (
            altered(haed_bias=torch.zeros(2)),
            {},
            r"1 tensors of the file are not in the model: haed.bias \(there is head.bias\)",
        ),
        (altered(), {"skip": ["fc.*"]}, r"train.init.skip: fc.\* matches no tensor of the model"),
        (
            altered(),
            {"key": "model"},
            r"train.init.key = model: .* the keys trunk.weight \(Tensor\)",
        ),
        (
            {"model": {}, "epoch": 3},
            {},
            r"no state_dict, but a mapping with the keys model \(dict\)",
        ),
        ([1, 2], {}, "no state_dict, but a value of type list"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_names_and_shapes(
    tmp_path: Path, state: Any, settings: dict[str, Any], problem: str
) -> None:
    torch.save(state, tmp_path / "m.pt")
    with pytest.raises(ConfigError) as error:
        check_initial_weights(init_of(tmp_path / "m.pt", **settings), None, network())
    assert re.search(problem, str(error.value), re.DOTALL), error.value


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("m.safetensors", b"\x08\0\0\0\0\0\0\0{", "is no whole file of safetensors"),
        ("m.pt", b"PK not a file", "holds no weights that may be loaded"),
        ("m.pt", b"", "holds no weights that may be loaded: it is empty"),
        ("m.pt", None, "has to be a file, and there is none"),
    ],
)
def test_a_damaged_or_missing_file_is_told(
    tmp_path: Path, name: str, content: bytes | None, problem: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        check_initial_weights(init_of(tmp_path / name), None, network())


class Program:
    """What a file must not be able to run."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("trace"),)


def test_no_program_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": Program()}, tmp_path / "m.pt")
    with pytest.raises(ConfigError, match="Nothing of it was run"):
        check_initial_weights(init_of(tmp_path / "m.pt"), None, network())
    assert not (tmp_path / "trace").exists()


# In a run.


def tuned_config(tmp_path: Path, **changes: Any) -> TrainerConfig:
    """The config of a run that starts from the weights of the file start.pt."""
    file = tmp_path / "start.pt"
    tmp_path.mkdir(exist_ok=True)
    config = small_config(tmp_path, train__init={"path": str(file)}, **changes)
    if not file.exists():
        torch.manual_seed(7)
        torch.save(recipe_of(config).build_model().state_dict(), file)
    return config


def test_a_run_starts_from_the_file_and_resumes_without_it(tmp_path: Path) -> None:
    config = tuned_config(tmp_path / "a", train__epochs=1)
    tensors = len(recipe_of(config).build_model().state_dict())
    assert check_start(config) == f"start: {tensors} tensors of {tmp_path}/a/start.pt"
    random = small_config(tmp_path / "b", train__epochs=1)
    train_here(config)
    train_here(random)
    assert not same(final_weights(config), final_weights(random))
    (tmp_path / "a/start.pt").unlink()
    longer = small_config(
        tmp_path / "a", train__init={"path": f"{tmp_path}/a/start.pt"}, train__epochs=2
    )
    assert train_here(longer, attempt=2).resumed_from is not None


@pytest.mark.ci
def test_workers_start_from_the_file_under_each_strategy(tmp_path: Path) -> None:
    two = {"train__epochs": 1, "scaling__num_workers": 2}
    configs = [
        tuned_config(tmp_path, name="copied", **two),
        tuned_config(tmp_path, name="sharded", train__strategy="fsdp2", **two),
        small_config(tmp_path, name="random", **two),
    ]
    told = tmp_path / "losses"
    run_processes(train_and_tell, (str(tmp_path / "meeting"), configs, str(told)), 2)
    copied, sharded, random = (losses[0] for losses in torch.load(told))
    assert sharded == pytest.approx(copied, rel=1e-5)
    assert random != pytest.approx(copied, rel=1e-3)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of fetched files of this test alone."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))


def test_a_file_in_a_bucket_is_fetched_once(
    tmp_path: Path, bucket: Bucket, cache: None, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = network()
    save_file(saved.state_dict(), tmp_path / "m.safetensors")
    folder = RunFolder.open(bucket.path, "weights", bucket.endpoint)
    folder.write(f"{folder.root}/m.safetensors", (tmp_path / "m.safetensors").read_bytes())
    init = InitialWeights.model_validate({"path": f"{bucket.path}/weights/m.safetensors"})
    for _ in range(2):
        model = network()
        load_initial_weights(init, bucket.endpoint, model)
        assert same(model.state_dict(), saved.state_dict())
    assert capsys.readouterr().err.count("fetching") == 1
    for name, problem in {"none.pt": "there is none", "": "it is a folder"}.items():
        wrong = InitialWeights.model_validate({"path": f"{bucket.path}/weights/{name}".rstrip("/")})
        with pytest.raises(ConfigError, match=f"has to be a file, and {problem}"):
            load_initial_weights(wrong, bucket.endpoint, network())


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a model of two files of weights, each with other weights."""
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        publish(hub, tmp_path / "first", 1)
        yield hub


def publish(hub: Hub, folder: Path, number: int) -> dict[str, nn.Module]:
    """Make new weights the newest commit of a model of a hub, and return them by file."""
    folder.mkdir()
    models = {name: network() for name in ("model.safetensors", "other.safetensors")}
    for name, model in models.items():
        save_file(model.state_dict(), folder / name)
    hub.publish("org/net", folder, number)
    return models


def test_a_file_of_a_hub_is_fetched_alone(tmp_path: Path, hub: Hub, cache: None) -> None:
    models = publish(hub, tmp_path / "second", 2)
    for name, settings in {
        "model.safetensors": {},
        "other.safetensors": {"file": "other.safetensors"},
    }.items():
        hub.fetched.clear()
        init = InitialWeights.model_validate({"path": "hf://org/net", **settings})
        assert same(load(init, network()).state_dict(), models[name].state_dict())
        assert hub.fetched == [name]
    with pytest.raises(
        ConfigError, match=r"has model\.safetensors, other\.safetensors, and none of x\.pt"
    ):
        load(InitialWeights.model_validate({"path": "hf://org/net", "file": "x.pt"}), network())


def test_a_run_keeps_the_commit_of_its_first_start_until_it_has_a_checkpoint(
    tmp_path: Path, hub: Hub, cache: None
) -> None:
    folder = RunFolder.open(str(tmp_path), "run", None)
    init = InitialWeights.model_validate({"path": "hf://org/net"})
    first = pinned_weights(init, folder)
    assert first.path == f"hf://org/net@{1:040x}"
    publish(hub, tmp_path / "second", 2)
    assert pinned_weights(init, folder).path == f"hf://org/net@{2:040x}", "nothing has started"
    note_weights(first, folder)
    note_weights(pinned_weights(init, folder), folder)
    assert pinned_weights(init, folder) == first


def test_a_file_in_a_model_is_only_named_of_a_hub(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="is for a model of the Hub"):
        init_of(tmp_path / "a.pt", file="model.safetensors")
