"""Runs of causal_lm whose model lies in a bucket or on a hub: attempts, resume, predict and export."""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attempts import Attempts
from s3_server import Bucket

pytest.importorskip("transformers")

from tests.support.hub_server import TOKEN, Hub, running_hub
from tests.support.tiny_models import make_folder
from tests.trainer.causal_runs import LORA, causal_config, write_chats
from tests.trainer.test_fetching import uploaded
from tests.trainer.test_language_model import text_config
from tests.trainer.training import open_folder
from trainyard_trainer.attempt import without_ray
from trainyard_trainer.attempt.attempt import with_pinned_model
from trainyard_trainer.attempt.checks import check
from trainyard_trainer.config.trainer_config import BuiltInConfig, TrainerConfig
from trainyard_trainer.data.sources.tokens import tokenizer_address
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.causal_lm import model_folder
from trainyard_trainer.recipes.causal_lm.folder import fingerprint
from trainyard_trainer.recipes.registry import recipe_of
from trainyard_trainer.recipes.saved_model import read_saved
from trainyard_trainer.run_folder.log import Output
from trainyard_trainer.storage import StorageFolder, open_filesystem
from trainyard_trainer.tools import export, predict
from trainyard_trainer.tools.data import main as data_tool

ADDRESS = "hf://org/tiny"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files of weights, and files that must not be fetched."""
    folder = make_folder(
        tmp_path_factory.mktemp("model") / "tiny", max_shard_size="300KB", vocab_size=600
    )
    for name in ("pytorch_model.bin", "modeling_tiny.py", "model.gguf", "consolidated.safetensors"):
        (folder / name).write_bytes(b"never fetched")
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", 30)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of this test alone, of which this process remembers nothing."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    model_folder.fetched_once.cache_clear()
    tokenizer_address._fetched_once.cache_clear()
    return temporary / f"trainyard-models-{os.getuid()}"


@pytest.fixture
def hub(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        hub.publish("org/tiny", model)
        yield hub


@pytest.fixture(params=["s3", "hub"])
def place(request: pytest.FixtureRequest, model: Path) -> dict[str, Any]:
    """The keys of the model in a bucket, and on the hub."""
    if request.param == "hub":
        request.getfixturevalue("hub")
        return {"path": ADDRESS}
    bucket: Bucket = request.getfixturevalue("bucket")
    return {"path": uploaded(bucket, model), "endpoint": bucket.endpoint}


def run_config(tmp_path: Path, chats: Path, model: dict[str, Any], **changes: Any) -> BuiltInConfig:
    config = causal_config(tmp_path, Path("unused"), chats, train__epochs=1, **changes)
    document = config.model_dump(mode="json")
    document["train"]["model"] |= model
    return BuiltInConfig.model_validate(document)


def run(config: BuiltInConfig, tmp_path: Path) -> None:
    with Output(None) as output:
        without_ray.run(config, output, {})


def test_a_run_with_an_adapter_fetches_once_and_answers_and_is_merged_afterwards(
    tmp_path: Path, model: Path, chats: Path, cache: Path, place: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    config = run_config(tmp_path, chats, {**place, "adapter": LORA})
    run(config, tmp_path)
    folder = open_folder(config)
    base = json.loads(folder.read(f"{folder.root}/base_model.json"))
    assert base["sha256"] == fingerprint(str(model))
    assert base["path"] == place["path"] + ("" if "endpoint" in place else f"@{1:040x}")
    assert json.loads(folder.read(folder.run))["train"]["model"]["path"] == place["path"]
    names = {file.name for file in cache.rglob("*")}
    assert "model.safetensors.index.json" in names
    assert not names & {
        *("pytorch_model.bin", "modeling_tiny.py", "model.gguf", "consolidated.safetensors")
    }
    output = capfd.readouterr().out
    assert output.count("fetching") == 2, "the small files, and the whole folder"

    where = ["--storage", str(tmp_path), "chat"]
    for local in ([], ["--base-model", str(model)]):
        assert predict.main([*where, "--prompt", "What?", "--temperature", "0", *local]) == 0
    answers = capfd.readouterr()
    assert answers.out.splitlines()[0] == answers.out.splitlines()[1]
    for name, options in {"adapter": [], "merged": ["--merge"]}.items():
        assert export.main([*where, "--out", str(tmp_path / name), *options]) == 0
        assert (tmp_path / name / "tokenizer.json").is_file()
    adapter = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    known = (adapter["base_model_name_or_path"], adapter["revision"])
    assert known == ((place["path"], None) if "endpoint" in place else ("org/tiny", f"{1:040x}"))


def test_a_run_keeps_the_commit_of_its_first_start(
    tmp_path: Path, chats: Path, hub: Hub, cache: Path
) -> None:
    config = run_config(tmp_path, chats, {"path": ADDRESS, "adapter": LORA})
    run(config, tmp_path)
    hub.publish("org/tiny", make_folder(tmp_path / "moved", seed=7, vocab_size=600), 2)
    model_folder.fetched_once.cache_clear()
    longer = run_config(tmp_path, chats, {"path": ADDRESS, "adapter": LORA})
    longer = longer.model_copy(update={"train": longer.train.model_copy(update={"epochs": 2})})
    run(longer, tmp_path)
    folder = open_folder(config)
    assert json.loads(folder.read(folder.summary))["outcome"] == "succeeded"
    saved = read_saved(folder, "delivered")
    assert saved.config.path == f"{ADDRESS}@{1:040x}"
    other = longer.model_copy(update={"name": "other"})
    assert recipe_of(with_pinned_model(other, open_folder(other))).config.path.endswith("2")


@pytest.mark.parametrize("adapter", [None, LORA], ids=["all weights", "adapter"])
def test_a_bucket_whose_model_was_changed_goes_on_without_its_weights_alone(
    tmp_path: Path, chats: Path, bucket: Bucket, model: Path, adapter: dict[str, Any] | None
) -> None:
    place = {"path": uploaded(bucket, model), "endpoint": bucket.endpoint, "adapter": adapter}
    config = run_config(tmp_path, chats, place)
    folder = open_folder(config)
    recipe = recipe_of(config)
    recipe.prepare(folder, print)
    recipe.note_fetched(folder, [recipe.fetch()])
    if adapter is None:
        recipe.note_fetched(folder, ["another"])
        return
    with pytest.raises(ConfigError, match="holds another model than the one whose adapter"):
        recipe.note_fetched(folder, ["another"])


def _without_index(hub: Hub, folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _without_config(hub: Hub, folder: Path) -> None:
    (folder / "config.json").unlink()


def _gated(hub: Hub, folder: Path) -> None:
    hub.gated = True


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without_index, "lacks 1 files with weights, such as model.safetensors"),
        (_without_config, "has no config.json, but"),
        (_gated, "is gated"),
    ],
)
def test_a_remote_model_that_cannot_be_trained_is_refused_before_workers_start(
    tmp_path: Path, chats: Path, hub: Hub, spoil: Any, message: str
) -> None:
    folder = make_folder(tmp_path / "model", vocab_size=600)
    hub.publish("org/other", folder)
    spoil(hub, folder)
    config = run_config(tmp_path, chats, {"path": "hf://org/other"})
    with pytest.raises(ConfigError, match=message):
        check(with_pinned_model(config, open_folder(config)))


def test_random_weights_need_no_weights_of_the_hub(
    tmp_path: Path, chats: Path, hub: Hub, cache: Path
) -> None:
    config = run_config(tmp_path, chats, {"path": ADDRESS, "init": "random"})
    run(config.model_copy(update={"name": uuid.uuid4().hex[:8]}), tmp_path)
    assert not [*cache.rglob("model-*.safetensors")]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("hf://tiny", "write hf://org/name"),
        ("hf://org/tiny@", "write hf://org/name"),
        ("hf://org/tiny/extra", "write hf://org/name"),
        ("s3:///tiny", "names no bucket"),
        ("gs://bucket/tiny", "is neither a folder nor s3://bucket/prefix nor hf://org/name"),
        ("https://huggingface.co/org/tiny", "is neither a folder nor"),
    ],
)
def test_addresses_that_name_no_model_are_refused(
    tmp_path: Path, chats: Path, path: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_config(tmp_path, chats, {"path": path})


@pytest.mark.ci
def test_two_workers_of_a_node_share_one_fetch_on_ray(
    tmp_path: Path, chats: Path, hub: Hub, attempts: Attempts
) -> None:
    hub.gated = True
    config = run_config(tmp_path, chats, {"path": ADDRESS, "adapter": LORA}, scaling__num_workers=2)
    refused = attempts.finish(config, code=2)
    assert "is gated. Accept its terms" in refused
    assert "cluster: 1 node" not in refused
    output = attempts.finish(config, environment={"HF_TOKEN": TOKEN})
    assert output.index("cluster: 1 node") < output.rindex("fetching ")
    sent = [name for name in hub.fetched if name.endswith(".safetensors")]
    assert len(sent) == len(set(sent)) > 1
    assert "sha256" in attempts.read(config, "base_model.json")
    assert TOKEN not in output


# The tokenizer of a language model that is trained from scratch.


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    path = tmp_path / "prose.txt"
    path.write_text("".join(f"Line {number} of a long text.\n" for number in range(300)))
    return path


def token_config(tmp_path: Path, prose: Path, place: dict[str, Any]) -> TrainerConfig:
    """A run on tokens of a tokenizer at an address."""
    model = {"train__model__tokenizer": place["path"]}
    if "endpoint" in place:
        model["train__model__endpoint"] = place["endpoint"]
    return text_config(tmp_path, prose, train__model__context_length=16, **model)


def test_a_tokenizer_is_fetched_without_weights_and_copied_into_the_folder_of_the_run(
    tmp_path: Path, prose: Path, model: Path, cache: Path, place: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    config = token_config(tmp_path, prose, place)
    run(config, tmp_path)
    assert capfd.readouterr().out.count("fetching") == 1
    assert not [*cache.rglob("*.safetensors*")]
    folder = open_folder(config)
    own = folder.read(f"{folder.tokenizer}/tokenizer.json")
    assert own == (model / "tokenizer.json").read_bytes()
    known = json.loads(folder.read(folder.model_facts))
    assert known["tokens"]["tokenizer"].startswith(place["path"])
    assert json.loads(folder.read(folder.run))["train"]["model"]["tokenizer"] == place["path"]
    assert predict.main(["--storage", str(tmp_path), config.name, "--prompt", "Line 3"]) == 0
    assert capfd.readouterr().out.startswith("Line 3")


def test_a_run_keeps_the_commit_that_its_tokenizer_had_at_the_first_start(
    tmp_path: Path, prose: Path, hub: Hub
) -> None:
    config = token_config(tmp_path, prose, {"path": ADDRESS})
    run(config, tmp_path)
    hub.publish("org/tiny", make_folder(tmp_path / "moved", seed=7, vocab_size=700), 2)
    tokenizer_address._fetched_once.cache_clear()
    longer = config.model_copy(update={"train": config.train.model_copy(update={"epochs": 2})})
    run(longer, tmp_path)
    folder = open_folder(config)
    assert json.loads(folder.read(folder.summary))["outcome"] == "succeeded"
    assert read_saved(folder, "delivered").config.tokenizer == f"{ADDRESS}@{1:040x}"


def test_a_tokenizer_that_was_changed_in_its_bucket_is_refused_by_a_run_that_goes_on(
    tmp_path: Path, prose: Path, bucket: Bucket, model: Path
) -> None:
    address = uploaded(bucket, model)
    config = token_config(tmp_path, prose, {"path": address, "endpoint": bucket.endpoint})
    run(config, tmp_path)
    other = make_folder(tmp_path / "other", vocab_size=700)
    filesystem, root = open_filesystem(address, bucket.endpoint)
    StorageFolder(filesystem, root).upload(other / "tokenizer.json", f"{root}/tokenizer.json")
    tokenizer_address._fetched_once.cache_clear()
    longer = config.model_copy(update={"train": config.train.model_copy(update={"epochs": 2})})
    with pytest.raises(ConfigError, match="is not the tokenizer of the tokens of"):
        run(longer, tmp_path)


def _without_tokenizer(hub: Hub, folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        (folder / name).unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without_tokenizer, "hf://org/other@0*1 has .* and none of config.json, tokenizer.json"),
        (_gated, "train.model.tokenizer = hf://org/other.* is gated"),
        (None, "train.model.tokenizer = hf://org/missing"),
    ],
)
def test_a_remote_tokenizer_that_cannot_be_used_is_refused_before_workers_start(
    tmp_path: Path, prose: Path, hub: Hub, spoil: Any, message: str
) -> None:
    folder = make_folder(tmp_path / "model", vocab_size=600)
    hub.publish("org/other", folder)
    if spoil:
        spoil(hub, folder)
    name = "other" if spoil else "missing"
    config = token_config(tmp_path, prose, {"path": f"hf://org/{name}"})
    with pytest.raises(ConfigError, match=message):
        check(with_pinned_model(config, open_folder(config)))


def test_tokens_are_prepared_ahead_with_a_remote_tokenizer(
    tmp_path: Path, chats: Path, cache: Path, place: dict[str, Any]
) -> None:
    options = [f"--tokenizer={place['path']}", "--recipe=causal_lm", "--context-length=48"]
    if "endpoint" in place:
        # One server has both.
        bucket_chats = f"{place['path'].rpartition('/')[0]}/chats.jsonl"
        filesystem, path = open_filesystem(bucket_chats, place["endpoint"])
        StorageFolder(filesystem, path).upload(chats, path)
        options += [f"--endpoint={place['endpoint']}"]
        source = bucket_chats
    else:
        source = str(chats)
    dest = tmp_path / "dest"
    where = [f"--dest-endpoint={place['endpoint']}"] if "endpoint" in place else []
    assert data_tool(["prepare", *options, *where, "--", source, str(dest)]) == 0
    config = run_config(tmp_path, dest, place)
    run(config, tmp_path)
    assert not (tmp_path / config.name / "data").exists()
