"""Models, tokenizers, chat templates and rows that causal_lm cannot use are told before workers start."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.causal_runs import causal_config, write_chats
from tests.trainer.test_chat_data import ASSISTANT, USER, prepare, write_lines
from tests.trainer.training import open_folder

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig

from tests.support.tiny_models import TEMPLATE, make_folder, make_tokenizer_folder
from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.attempt.checks import check, check_data
from trainyard_trainer.errors import ConfigError

Spoil = Callable[[Path], Any]

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
NAMES = "has no weight_map from the names of weights"
UNUSABLE = "is no model that Transformers can use"
CHAT = {"messages": [USER, ASSISTANT]}


def written(name: str, content: bytes) -> Spoil:
    """Replace a file of the folder."""
    return lambda folder: (folder / name).write_bytes(content)


def cut(name: str, size: int) -> Spoil:
    """Leave the begin of a file."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def configured(**changes: Any) -> Spoil:
    """Change keys of config.json; one whose value is None is removed."""

    def spoil(folder: Path) -> None:
        known = json.loads((folder / CONFIG).read_text()) | changes
        kept = {key: value for key, value in known.items() if value is not None}
        (folder / CONFIG).write_text(json.dumps(kept))

    return spoil


def unlinked(*names: str) -> Spoil:
    return lambda folder: [(folder / name).unlink() for name in names]


def untouched(folder: Path) -> None:
    """Change nothing."""


def stored(**changes: torch.Tensor | None) -> Spoil:
    """Change weights of the file, whose names have `__` in place of a dot; one that is None is removed."""

    def spoil(folder: Path) -> None:
        known = load_file(folder / WEIGHTS)
        known |= {name.replace("__", "."): value for name, value in changes.items()}  # type: ignore
        kept = {name: value for name, value in known.items() if value is not None}
        save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})

    return spoil


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model") / "tiny", vocab_size=600)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", 10)


@pytest.mark.parametrize(
    ("spoil", "changes", "message"),
    [
        (written(CONFIG, b"["), {}, "is not a valid JSON file"),
        (written(CONFIG, b"[]"), {}, UNUSABLE),
        (configured(model_type=None), {}, "Should have a `model_type` key"),
        (configured(model_type="nope"), {}, "model type `nope`"),
        (configured(model_type="t5"), {}, UNUSABLE),
        (configured(model_type="bert"), {"train__packing": False}, "sees the tokens behind each"),
        (configured(model_type="own", auto_map={"AutoConfig": "a.B"}), {}, "contains custom code"),
        (configured(hidden_size="64"), {}, "expected int, got str"),
        (configured(num_attention_heads=0), {}, "ZeroDivisionError"),
        (configured(hidden_act="nope"), {}, "KeyError: 'nope'"),
        (configured(dtype="float7"), {}, "no attribute 'float7'"),
        (cut(WEIGHTS, 9000), {}, "is no whole file of safetensors"),
        (written(WEIGHTS, b""), {}, "is no whole file of safetensors"),
        (written(WEIGHTS, b"version https://git-lfs.github.com/spec/v1"), {}, "git lfs pull"),
        (written(INDEX, b"{}"), {}, NAMES),
        (written(INDEX, b"{"), {}, NAMES),
        (written(INDEX, b'{"weight_map": {"a": "../b.safetensors"}}'), {}, NAMES),
        (
            written(INDEX, b'{"weight_map": {"a": "b.safetensors"}}'),
            {},
            "lacks b.safetensors and 0 more",
        ),
        (
            untouched,
            {"train__model__adapter": {"kind": "lora", "targets": ["norm"]}},
            "train.model.adapter cannot be added to this model: Target module LlamaRMSNorm",
        ),
    ],
    ids=[
        *("config cut", "config list", "no type", "unknown type", "t5", "bert", "own code"),
        *("text for number", "no heads", "activation", "dtype", "weights cut", "weights empty"),
        *("git lfs", "index without map", "index cut", "index outside", "shard missing", "target"),
    ],
)
def test_a_model_that_cannot_be_trained_is_told(
    tmp_path: Path, model: Path, chats: Path, spoil: Spoil, changes: dict[str, Any], message: str
) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    spoil(folder)
    with pytest.raises(ConfigError, match=message):
        check(causal_config(tmp_path / "runs", folder, chats, **changes))


NORM = torch.ones(64)
OTHER_SHAPE = (
    r"1 tensors have another shape: model.norm.weight \(64,\) in the model, \(8,\) in the file"
)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (stored(model__norm__weight=None), "1 tensors are missing in the files: model.norm.weight"),
        (
            stored(model__norm__weight=None, model__nrom__weight=NORM),
            r"model.norm.weight \(there is model.nrom.weight\)",
        ),
        (stored(model__norm__weight=torch.ones(8)), OTHER_SHAPE),
        (configured(num_hidden_layers=3), "9 tensors are missing .*model.layers.2.* and 4 more"),
        (configured(intermediate_size=96), r"6 tensors have another shape: .*\(96, 64\)"),
        (
            stored(model__norm__weight=torch.ones(64, dtype=torch.int8)),
            "1 weights are neither F64, nor F32, nor F16, nor BF16, such as model.norm.weight",
        ),
        (
            configured(quantization_config={"quant_method": "gptq", "bits": 4}),
            r"quantised \(gptq\)",
        ),
        (
            written(INDEX, b'{"weight_map": {"lm_head.bias": "model.safetensors"}}'),
            "model.safetensors lacks lm_head.bias, which the index names, and 0 more",
        ),
    ],
    ids=[
        *("missing", "another name", "another shape", "more layers", "wider", "integers"),
        *("quantised", "index with more"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_told_by_name_before_workers_start(
    tmp_path: Path, model: Path, chats: Path, spoil: Spoil, message: str
) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    spoil(folder)
    config = causal_config(tmp_path / "runs", folder, chats)
    with pytest.raises(ConfigError, match=message):
        check(config)


def test_weights_that_the_config_does_not_use_are_named(
    tmp_path: Path, model: Path, chats: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    configured(num_hidden_layers=1)(folder)
    check(causal_config(tmp_path / "runs", folder, chats))
    assert "9 weights of" in (found := capfd.readouterr().out)
    assert "are left out, such as model.layers.1." in found


@pytest.mark.parametrize("lost", [0, 1], ids=["whole", "an expert is missing"])
def test_weights_that_transformers_joins_are_compared_as_it_joins_them(
    tmp_path: Path, model: Path, chats: Path, lost: int
) -> None:
    folder = shutil.copytree(model, tmp_path / "model", ignore=lambda *_: [CONFIG, WEIGHTS])
    sizes = {"vocab_size": 600, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
    AutoModelForCausalLM.from_config(MixtralConfig(**sizes, **heads)).save_pretrained(folder)
    weights = load_file(folder / WEIGHTS)
    names = sorted(name for name in weights if ".experts." in name)
    kept = {name: each for name, each in weights.items() if name not in names[:lost]}
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})
    config = causal_config(tmp_path / "runs", folder, chats)
    if not lost:
        check(config)
        return
    with pytest.raises(ConfigError, match=r"cannot join the weights .* of a MixtralForCausalLM"):
        check(config)


TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
FAST = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": 5}'


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut(TOKENIZER, 500), "Unterminated string"),
        (written(TOKENIZER, b"{}"), "KeyError: 'added_tokens'"),
        (
            written(TOKENIZER, b'{"version": "1.0", "added_tokens": [], "model": {"type": "?"}}'),
            "cannot be loaded: Exception: data did not match",
        ),
        (written(SETTINGS, b"[]"), "AttributeError: 'list' object"),
        (written(SETTINGS, FAST.encode()), "TypeError: Special token eos_token"),
        (
            written(
                SETTINGS,
                b'{"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["a.Own", null]}}',
            ),
            "contains custom code",
        ),
        (written("chat_template.jinja", b"\xff\xfe"), "can't decode byte 0xff"),
        (written(CONFIG, b"[]"), "config.json has no settings of a model"),
    ],
    ids=["cut", "empty", "model", "settings", "end", "own code", "template", "config"],
)
def test_a_tokenizer_that_cannot_be_loaded_is_told(
    tmp_path: Path, spoil: Spoil, message: str
) -> None:
    folder = make_tokenizer_folder(tmp_path / "tokenizer", template=TEMPLATE)
    spoil(folder)
    source = write_lines(tmp_path / "rows.jsonl", [CHAT] * 4)
    with pytest.raises(ConfigError, match=message):
        prepare(tmp_path, source, str(folder))


@pytest.mark.parametrize(
    ("template", "row", "loss_on", "message"),
    [
        ("{% for m in messages %}", CHAT, "answers", "fails: TemplateSyntaxError"),
        ("{% for i in range(10**9) %}x{% endfor %}", CHAT, "answers", "fails: OverflowError"),
        ("{{ messages.__class__.__mro__ }}", CHAT, "answers", "fails: SecurityError"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", CHAT, "all", "fails: RecursionError"),
        ("{% include 'other' %}", CHAT, "answers", "chat template fails"),
        ("{% if false %}x{% endif %}", CHAT, "all", "Check that the rows are not empty"),
        (TEMPLATE, {"messages": [USER]}, "answers", "only turns of the role assistant and"),
        (
            TEMPLATE,
            {"messages": [USER, {"role": "Assistant", "content": "a"}]},
            "answers",
            "Check the roles",
        ),
        (
            TEMPLATE,
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, ASSISTANT]},
            "answers",
            "fails: TypeError: can only concatenate list",
        ),
        (TEMPLATE, {"messages": json.dumps([USER])}, "answers", "messages is text; it has to be"),
        (TEMPLATE, {**CHAT, "tools": {"a": 1}}, "answers", "tools is an object; it has to be"),
        (TEMPLATE, {"text": ""}, "answers", "have no token to learn"),
    ],
    ids=[
        *("syntax", "range", "private", "recursion", "include", "nothing", "no answer", "role"),
        *("image", "messages as text", "tools", "empty text"),
    ],
)
def test_rows_and_templates_that_give_no_sample_are_told(
    tmp_path: Path, template: str, row: dict[str, Any], loss_on: str, message: str
) -> None:
    folder = str(make_tokenizer_folder(tmp_path / "tokenizer", template=template))
    source = write_lines(tmp_path / "rows.jsonl", [row] * 4)
    with pytest.raises(ConfigError, match=message):
        prepare(tmp_path, source, folder, loss_on=loss_on)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("generation_config.json", b"{", "generation_config.json is no JSON"),
        ("generation_config.json", b"[]", "generation_config.json has no settings"),
        (
            "chat_template.jinja",
            b"{% for m in messages %}{{ m.content }}{% endfor %}",
            r"train.prompts\[0\] = '': it has no token",
        ),
    ],
    ids=["cut", "a list", "empty prompt"],
)
def test_prompts_that_cannot_be_continued_are_told_before_workers_start(
    tmp_path: Path, model: Path, chats: Path, name: str, content: bytes, message: str
) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / name).write_bytes(content)
    config = causal_config(tmp_path / "runs", folder, chats, train__prompts=[""])
    data = open_data(config, open_folder(config))
    with pytest.raises(ConfigError, match=message):
        check_data(config, data)
