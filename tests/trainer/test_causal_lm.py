"""The recipe causal_lm: documents, adapters, shards, checkpoints, and what is refused before training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional

from tests.trainer.causal_runs import CONTEXT_LENGTH, LORA, causal_config, write_chats
from tests.trainer.test_fsdp2 import losses_of_steps, train
from tests.trainer.test_loop import kill_after_saves
from tests.trainer.training import (
    final_weights,
    metrics,
    open_folder,
    same,
    step_losses,
    train_here,
)

pytest.importorskip("transformers")

from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GenerationConfig,
    GraniteConfig,
)

from tests.support.tiny_models import make_folder, make_tokenizer
from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.attempt.checks import check, check_data
from trainyard_trainer.checkpointing.checkpoint import VALIDATION, Checkpoints
from trainyard_trainer.config.training.models import CausalModel
from trainyard_trainer.config.training.train import CausalLm
from trainyard_trainer.data.prepared import LEARNT, PADDING, STARTS_DOCUMENT
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.recipes.causal_lm.documents import IGNORED, documents_of
from trainyard_trainer.recipes.causal_lm.folder import require_separate_texts
from trainyard_trainer.recipes.causal_lm.hub_folder import write_adapter, write_model
from trainyard_trainer.recipes.causal_lm.network import CausalNetwork, has_plain_scores
from trainyard_trainer.recipes.causal_lm.texts.generation import continued, generated
from trainyard_trainer.recipes.causal_lm.weights import build_network
from trainyard_trainer.recipes.registry import recipe_of
from trainyard_trainer.recipes.saved_model import read_saved

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model") / "tiny", dropout=0.1)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl")


# The network.


def test_documents_have_positions_of_their_own_and_learn_the_marked_tokens() -> None:
    tokens = torch.tensor([[5, 6, 7, 8, 9, 0]], dtype=torch.int32)
    flags = torch.tensor(
        [[STARTS_DOCUMENT, LEARNT, STARTS_DOCUMENT, 0, LEARNT, PADDING | STARTS_DOCUMENT]],
        dtype=torch.uint8,
    )
    found = documents_of(tokens, flags)
    assert found.positions.tolist() == [[0, 1, 0, 1, 2, 0]]
    assert found.targets.tolist() == [[6, IGNORED, IGNORED, 9, IGNORED, IGNORED]]


@pytest.mark.parametrize("adapter", [None, LORA], ids=["all weights", "adapter"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2", "qwen3"])
def test_a_document_in_a_packed_row_has_the_loss_that_it_has_alone(
    tmp_path: Path, kind: Any, adapter: dict[str, Any] | None
) -> None:
    folder = make_folder(tmp_path / kind, kind)
    config = CausalModel.model_validate({"path": str(folder), "adapter": adapter})
    network = build_network(config, seed=0, is_sharded=False).eval()
    tokens = torch.randint(4, 2000, (2, 24), dtype=torch.int32)
    flags = torch.full((2, 24), LEARNT, dtype=torch.uint8)
    flags[:, 0] = flags[:, 9] = STARTS_DOCUMENT
    alone = torch.zeros(())
    for row in tokens.long():
        for document in (row[:9], row[9:]):
            scores = network(document[None])[0]
            alone += functional.cross_entropy(scores[:-1], document[1:], reduction="sum")
    packed = network(tokens, documents_of(tokens, flags))
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "is_plain"),
    [
        (Gemma2Config(head_dim=8, final_logit_softcapping=2.0), False),
        (CohereConfig(logit_scale=0.25), False),
        (GraniteConfig(logits_scaling=4.0), False),
    ],
    ids=["soft capping", "scale", "division"],
)
def test_scores_that_a_model_changes_behind_its_output_layer_are_kept(
    config: Any, is_plain: bool
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    config.update(sizes | {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0})
    language = AutoModelForCausalLM.from_config(config)
    assert has_plain_scores(language) is is_plain
    tokens = torch.randint(1, 64, (2, 12))
    flags = torch.full((2, 12), LEARNT, dtype=torch.uint8)
    flags[:, 0] = STARTS_DOCUMENT
    found = CausalNetwork(language)(tokens, documents_of(tokens, flags))
    own = language(input_ids=tokens, labels=tokens).loss * 2 * 11
    torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-5)


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "llama"}, None),
        ({"model_type": "mistral"}, None),
        ({"model_type": "mixtral", "num_local_experts": 2}, None),
        ({"model_type": "gemma2"}, None),
        ({"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4}, None),
        ({"model_type": "mamba", "state_size": 4}, "carry a state"),
        ({"model_type": "recurrent_gemma", "lru_width": 32}, "carry a state"),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, "carry a state"),
        ({"model_type": "gpt_oss", "num_local_experts": 4}, "without position ids"),
        ({"model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32}, "without position ids"),
        ({"model_type": "bloom", "n_layer": 2, "n_head": 4}, "without position ids"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_packing_is_refused_for_the_models_whose_texts_see_each_other_in_a_row(
    tmp_path: Path, chats: Path, config: dict[str, Any], reason: str | None
) -> None:
    known = AutoConfig.for_model(**SIZES | config)
    torch.manual_seed(0)
    network = CausalNetwork(AutoModelForCausalLM.from_config(known)).eval()
    tokens = torch.randint(1, 64, (2, 24))
    tokens[1, 9:] = tokens[0, 9:]
    flags = torch.full((2, 24), LEARNT, dtype=torch.uint8)
    flags[:, :9] = 0
    flags[:, 0] = flags[:, 9] = STARTS_DOCUMENT
    with torch.no_grad():
        # Only the first text of the rows differs, and nothing is learnt of it.
        one, other = (
            network(tokens[row : row + 1], documents_of(tokens[row : row + 1], flags[:1]))
            for row in (0, 1)
        )
    assert bool(one != other) is (reason is not None)
    if reason is None:
        require_separate_texts(str(tmp_path), known)
        return
    known.save_pretrained(tmp_path)
    refused = causal_config(tmp_path, tmp_path, chats, train__model__init="random")
    with pytest.raises(ConfigError, match=f"{reason}.*\\n.*Set train.packing: false"):
        check(refused)


def test_a_recurrent_model_learns_rows_of_one_text_each(tmp_path: Path, chats: Path) -> None:
    folder = tmp_path / "mamba"
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    AutoConfig.for_model("mamba", **SIZES | {"state_size": 4} | ids).save_pretrained(folder)
    changes = {"train__model__init": "random", "train__packing": False}
    config = causal_config(tmp_path, folder, chats, **changes)
    check(config)
    train_here(config)
    losses = [each["val_loss"] for each in metrics(config, "epoch")]
    assert losses[1] < losses[0]


# Training.


@pytest.mark.ci
@pytest.mark.parametrize("adapter", [None, LORA], ids=["all weights", "adapter"])
def test_a_run_that_was_killed_in_mid_epoch_has_the_weights_of_one_that_was_not(
    tmp_path: Path, model: Path, chats: Path, adapter: dict[str, Any] | None
) -> None:
    changes = {
        "train__model__adapter": adapter,
        "train__epochs": 3,
        "train__micro_batch_size": 2,
        "checkpoint__every_samples": 8,
        "checkpoint__keep": 99,
    }
    whole = causal_config(tmp_path / "whole", model, chats, **changes)
    cut = causal_config(tmp_path / "cut", model, chats, **changes)
    train_here(whole)
    kill_after_saves(cut, 2, attempt=1)
    assert train_here(cut, attempt=2).resumed_from is not None
    assert same(final_weights(cut), final_weights(whole))
    assert metrics(cut)[-1]["val_loss"] == metrics(whole)[-1]["val_loss"]


def test_checkpoints_of_an_adapter_hold_nothing_but_the_adapter(
    tmp_path: Path, model: Path, chats: Path
) -> None:
    config = causal_config(tmp_path, model, chats, train__model__adapter=LORA)
    train_here(config)
    names = final_weights(config).keys()
    assert names
    assert all(".lora_" in name for name in names)


@pytest.mark.parametrize(
    "changes",
    [
        {"train__micro_batch_size": 1},
        {"train__model__gradient_checkpointing": True},
        {"train__model__attention": "eager"},
    ],
    ids=["passes", "gradient checkpointing", "attention"],
)
def test_how_a_step_is_computed_does_not_change_its_loss(
    tmp_path: Path, chats: Path, changes: dict[str, Any]
) -> None:
    folder = make_folder(tmp_path / "model")
    losses = []
    for name, more in (("plain", {}), ("other", changes)):
        config = causal_config(tmp_path / name, folder, chats, **more)
        with step_losses(Worker(device=CPU)) as of_steps:
            train_here(config)
        losses.append(of_steps)
    plain, other = losses
    assert len(plain) > 4
    assert other == pytest.approx(plain, rel=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize(
    "adapter",
    [
        pytest.param(None, id="all weights", marks=pytest.mark.ci),
        pytest.param(LORA | {"dropout": 0.0}, id="adapter"),
    ],
)
def test_two_workers_with_copies_or_with_shards_learn_what_one_worker_learns(
    tmp_path: Path, chats: Path, adapter: dict[str, Any] | None
) -> None:
    folder = make_folder(tmp_path / "model", max_shard_size="300KB", width=96, tied=False)
    changes = {"train__model__adapter": adapter, "train__micro_batch_size": 1}
    alone = causal_config(tmp_path / "one", folder, chats, **changes)
    with step_losses(Worker(device=CPU)) as of_one:
        train_here(alone)
    two = {**changes, "scaling__num_workers": 2}
    copied = causal_config(tmp_path / "ddp", folder, chats, **two)
    shared = causal_config(tmp_path / "fsdp2", folder, chats, **two, train__strategy="fsdp2")
    of_copied, of_shared = losses_of_steps(copied, shared)
    assert of_copied == pytest.approx(of_one, rel=1e-4)
    assert of_shared == pytest.approx(of_one, rel=1e-4)
    found = read_saved(open_folder(shared), "last").weights
    assert found.keys() == final_weights(copied).keys()


@pytest.mark.ci
@pytest.mark.parametrize("stage", [2, 3])
def test_passes_of_deepspeed_learn_what_one_pass_and_one_worker_learn(
    tmp_path: Path, chats: Path, stage: int
) -> None:
    pytest.importorskip("deepspeed")
    folder = make_folder(tmp_path / "model")
    alone = causal_config(tmp_path / "one", folder, chats)
    with step_losses(Worker(device=CPU)) as of_one:
        train_here(alone)
    two = {
        "scaling__num_workers": 2,
        "train__strategy": "deepspeed",
        "train__deepspeed": {"stage": stage},
    }
    whole = causal_config(tmp_path / "whole", folder, chats, **two)
    passes = causal_config(tmp_path / "passes", folder, chats, **two, train__micro_batch_size=1)
    of_whole, of_passes = losses_of_steps(whole, passes)
    assert of_whole == pytest.approx(of_one, rel=1e-4)
    assert of_passes == pytest.approx(of_one, rel=1e-4)


@pytest.mark.ci
@pytest.mark.parametrize("workers", [2, 1])
def test_an_adapter_goes_on_from_its_shards_with_any_number_of_workers(
    tmp_path: Path, model: Path, chats: Path, workers: int
) -> None:
    changes: dict[str, Any] = {
        "train__model__adapter": LORA,
        "train__strategy": "fsdp2",
        "train__schedule": {"name": "constant"},
        "scaling__num_workers": 2,
    }
    whole = causal_config(tmp_path / "whole", model, chats, **changes)
    train(whole)
    train(causal_config(tmp_path / "cut", model, chats, **changes, train__epochs=1))
    resumed = causal_config(
        tmp_path / "cut", model, chats, **{**changes, "scaling__num_workers": workers}
    )
    train(resumed, attempt=2)
    assert [record["epoch"] for record in metrics(resumed, "epoch")] == [1, 2]
    found, wanted = (read_saved(open_folder(each), "last").weights for each in (resumed, whole))
    if workers == 2:
        assert same(found, wanted)
    else:
        assert found.keys() == wanted.keys()
        assert metrics(resumed)[-1]["loss"] == pytest.approx(metrics(whole)[-1]["loss"], rel=0.05)


@pytest.mark.slow
def test_a_run_that_is_killed_twenty_times_has_the_same_bits(
    tmp_path: Path, model: Path, chats: Path
) -> None:
    changes = {
        "train__model__adapter": LORA,
        "train__epochs": 12,
        "checkpoint__every_samples": 4,
        "checkpoint__keep": 99,
    }
    whole = causal_config(tmp_path / "whole", model, chats, **changes)
    cut = causal_config(tmp_path / "cut", model, chats, **changes)
    train_here(whole)
    for attempt in range(1, 21):
        kill_after_saves(cut, 1 + attempt % 2, attempt=attempt)
    assert train_here(cut, attempt=21).resumed_from is not None
    assert same(final_weights(cut), final_weights(whole))


def test_the_learning_rate_of_a_norm_has_no_weight_decay(model: Path, tmp_path: Path) -> None:
    config = causal_config(tmp_path, model, tmp_path / "none.jsonl")
    recipe = recipe_of(config)
    with torch.device("meta"):
        network = recipe.build_model()
    decayed, others = recipe.parameter_groups(network)
    assert isinstance(decayed, dict)
    assert isinstance(others, dict)
    assert {each.dim() for each in decayed["params"]} == {2}
    assert others["weight_decay"] == 0.0
    assert {each.dim() for each in others["params"]} == {1}


def test_frozen_weights_take_fewer_operations_and_the_model_is_built_once_to_count_them(
    tmp_path: Path, model: Path, chats: Path
) -> None:
    flops = []
    for name, adapter in (("all", None), ("adapter", LORA)):
        config = causal_config(tmp_path / name, model, chats, train__model__adapter=adapter)
        recipe = recipe_of(config, open_data(config, open_folder(config)).info)
        flops.append(recipe.flops_per_sample())
        with patch.object(type(recipe), "build_model", side_effect=AssertionError):
            assert recipe.flops_per_sample() == flops[-1]
    weights = sum(each.numel() for each in load_file(model / "model.safetensors").values())
    attention = 12 * 2 * 64 * CONTEXT_LENGTH
    assert flops[0] == (6 * weights + attention) * CONTEXT_LENGTH
    assert flops[1] < flops[0]


def test_prompts_are_continued_at_each_validation(tmp_path: Path, model: Path, chats: Path) -> None:
    config = causal_config(tmp_path, model, chats, train__prompts=["What is 1 plus 1?"])
    train_here(config)
    checkpoints = Checkpoints(open_folder(config))
    newest = checkpoints.newest()
    assert newest is not None
    texts = checkpoints.load(newest.name, VALIDATION)["texts"]
    assert [(each["prompt"], each["temperature"]) for each in texts] == [
        ("What is 1 plus 1?", 0.0),
        ("What is 1 plus 1?", 1.0),
    ]


def test_the_texts_of_each_validation_are_drawn_with_other_random_numbers(
    tmp_path: Path, model: Path, chats: Path
) -> None:
    config = causal_config(tmp_path, model, chats, train__prompts=["What is 1 plus 1?"])
    recipe = recipe_of(config)
    network = recipe.build_model().eval()
    with torch.no_grad():
        first, again, later = (
            [text["text"] for text in recipe.demonstrate(network, step=step)["texts"]]
            for step in (4, 4, 8)
        )
    assert first == again
    assert first[0] == later[0]
    assert first[1] != later[1]


# Generation and export.


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_shared_model_writes_what_generate_of_transformers_writes(
    tmp_path: Path, kind: Any, temperature: float
) -> None:
    folder = make_folder(tmp_path / "model", kind, tied=False)
    # Settings that the model's folder has for servers change nothing.
    own = GenerationConfig(repetition_penalty=50.0, no_repeat_ngram_size=1, num_beams=2)
    own.save_pretrained(folder)
    config = CausalModel.model_validate({"path": str(folder)})
    network = build_network(config, seed=0, is_sharded=False).eval()
    assert network.model.generation_config.repetition_penalty == 50.0
    prompts = [[5, 6, 7, 8], [900, 901], [17] * 9]
    options: dict[str, Any] = {"length": 6, "temperature": temperature, "seed": 4, "padding": 3}
    with torch.no_grad():
        first = generated(network.model, prompts, rows=[0, 1, 2], ends={2}, **options)
        ends = {2, first[0][3]}
        ours = continued(network, prompts, ends=ends, device=CPU, unfinished=int, **options)
    assert ours == generated(network.model, prompts, rows=[0, 1, 2], ends=ends, **options)
    assert ours[0] == first[0][:3]


@pytest.mark.parametrize(
    "adapter",
    [LORA, LORA | {"dora": True}, LORA | {"rslora": True, "targets": ["q_proj", "down_proj"]}],
    ids=["lora", "dora", "rslora"],
)
def test_an_exported_adapter_and_the_merged_model_have_the_scores_of_the_run(
    tmp_path: Path, model: Path, chats: Path, adapter: dict[str, Any]
) -> None:
    config = causal_config(
        tmp_path,
        model,
        chats,
        train__model__adapter=adapter,
        train__optimizer={"name": "adamw", "learning_rate": 1e-2},
    )
    train_here(config)
    saved = read_saved(open_folder(config), "last")
    tokens = torch.randint(4, 2000, (2, 12))
    with torch.no_grad():
        wanted = saved.build()(tokens)
    write_adapter(tmp_path / "adapter", saved.recipe, saved.weights, saved.facts)
    write_model(tmp_path / "merged", saved.recipe, saved.build(), saved.facts)
    base = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        assert (base(tokens).logits - wanted).abs().max() > 1e-3
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(adapted(tokens).logits, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(merged(tokens).logits, wanted, rtol=1e-4, atol=1e-5)
    for folder in ("adapter", "merged"):
        files = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / folder).iterdir()}
        assert {"README.md", "tokenizer.json", "chat_template.jinja"} <= files.keys()
        card = (tmp_path / folder / "README.md").read_text()
        assert 'base_model: "tiny"' in card
        assert "license: other" in card
        assert f"| SHA-256 of the data | {saved.facts['tokens']['rows_sha256']} " in card
        assert set(files.values()) == {0o644}


# What is refused before training.


def _cut(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])


def _lose_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _other_architecture(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))


@pytest.mark.parametrize(
    ("spoil", "changes", "message"),
    [
        (None, {"train__model__path": "/no/such/model"}, "has to be a folder, and there is none"),
        (lambda folder: (folder / "config.json").unlink(), {}, "has no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), {}, "has no weights"),
        (_cut, {}, "is no whole file of safetensors"),
        (_other_architecture, {}, "is no model that Transformers can use"),
        (
            None,
            {"train__model__adapter": LORA | {"targets": ["q_prj"]}},
            "has no module q_prj. It has q_proj",
        ),
        (None, {"train__context_length": 1024}, "more than the 512 positions"),
        (None, {"train__model__attention": "flex"}, "flex needs GPUs"),
        (None, {"train__model__attention": "flash"}, "needs the package flash-attn"),
    ],
    ids=[
        *(
            "no folder",
            "no config",
            "no weights",
            "cut file",
            "architecture",
            "targets",
            "positions",
        ),
        *("flex on CPUs", "flash"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_before_workers_start(
    tmp_path: Path, chats: Path, spoil: Any, changes: dict[str, Any], message: str
) -> None:
    folder = make_folder(tmp_path / "model")
    if spoil:
        spoil(folder)
    config = causal_config(tmp_path, folder, chats, **changes)
    with pytest.raises(ConfigError, match=message):
        check(config)


def test_a_folder_that_lacks_a_weight_is_refused(tmp_path: Path, chats: Path) -> None:
    folder = make_folder(tmp_path / "model")
    _lose_a_weight(folder)
    config = causal_config(tmp_path, folder, chats)
    with pytest.raises(ConfigError, match=r"1 tensors are missing in the files: model\.norm"):
        recipe_of(config).build_model()


def test_an_adapter_goes_on_with_its_own_model_alone(
    tmp_path: Path, model: Path, chats: Path
) -> None:
    config = causal_config(tmp_path, model, chats, train__model__adapter=LORA)
    folder = open_folder(config)
    recipe_of(config).prepare(folder, print)
    recipe_of(config).prepare(folder, print)
    other = causal_config(
        tmp_path, make_folder(tmp_path / "other", seed=7), chats, train__model__adapter=LORA
    )
    with pytest.raises(ConfigError, match="holds another model than the one whose adapter"):
        recipe_of(other).prepare(folder, print)


def test_tokens_that_were_prepared_otherwise_are_refused(
    tmp_path: Path, model: Path, chats: Path
) -> None:
    config = causal_config(tmp_path, model, chats)
    data = open_data(config, open_folder(config))
    check_data(config, data)
    other = causal_config(tmp_path, model, chats, train__loss_on="all")
    with pytest.raises(ConfigError, match=r"train\.loss_on: answers in the data, all in the run"):
        check_data(other, data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init": {"path": "/weights.pt"}}, "init means nothing to recipe causal_lm"),
        ({"ema_decay": 0.9, "model": {"path": "/m", "adapter": LORA}}, "does not fit an adapter"),
        ({"model": {"path": "/m", "adapter": {"kind": "prefix"}}}, "Input should be 'lora'"),
    ],
    ids=["init", "average", "adapter"],
)
def test_settings_that_contradict_each_other_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    train = {
        "recipe": "causal_lm",
        "model": {"path": "/m"},
        "context_length": 8,
        "epochs": 1,
        "global_batch_size": 1,
    }
    with pytest.raises(ValueError, match=message):
        CausalLm.model_validate(train | changes)
