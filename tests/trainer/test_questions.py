"""Questions with known answers: what counts as correct, on any number of workers, and bad files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.causal_runs import LORA, causal_config, write_chats
from tests.trainer.test_fsdp2 import losses_of_steps
from tests.trainer.training import Group, final_weights, metrics, open_folder, same, train_here

pytest.importorskip("transformers")

from tests.support.tiny_models import make_folder
from trainyard.cli.record_lines import progress_text
from trainyard_trainer.attempt.checks import check
from trainyard_trainer.attempt.summary import AttemptEnd, summarise
from trainyard_trainer.checkpointing import resume
from trainyard_trainer.checkpointing.checkpoint import VALIDATION, Checkpoints
from trainyard_trainer.config.training.models import CausalModel
from trainyard_trainer.config.training.train import Questions
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.recipes.causal_lm.report import ANSWER_COLUMNS, answer_rows
from trainyard_trainer.recipes.causal_lm.texts.prompts import Prompts
from trainyard_trainer.recipes.causal_lm.texts.questions import (
    GIVEN_ANSWERS,
    Examination,
    is_match,
    read_questions,
)
from trainyard_trainer.recipes.causal_lm.weights import build_network
from trainyard_trainer.report.elements import table

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model") / "tiny", tied=False, width=96, dropout=0.1)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl")


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(path: Path, match: str) -> Questions:
    return Questions.model_validate({"path": str(path), "match": match, "max_tokens": 6})


def read(questions: Questions, model: Path) -> Any:
    return read_questions(questions, Prompts(str(model)), context_length=48, endpoint=None)


ROWS = [{"prompt": f"What is {number} plus {'1' * (number % 3 + 1)}?"} for number in range(7)]


def rows_of(match: str) -> list[dict[str, Any]]:
    """Four of the seven questions are answered as the rows say, whatever the model answers."""
    if match == "regex":
        return [row | {"answer": "^" if place < 4 else "no such"} for place, row in enumerate(ROWS)]
    return [row | {"choices": [" yes", " no", " I do not know"], "answer": " no"} for row in ROWS]


# One question.


@pytest.mark.parametrize(
    ("match", "text", "answer", "is_correct"),
    [
        ("exact", " 12\n", "12", True),
        ("exact", "It is 12", "12", False),
        ("regex", "It is 12.", r"\b12\b", True),
        ("regex", "It is 123.", r"\b12\b", False),
    ],
)
def test_a_text_is_correct_as_its_match_says(
    match: str, text: str, answer: str, is_correct: bool
) -> None:
    assert is_match(match, text, answer) is is_correct


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_choice_with_the_highest_probability_counts(tmp_path: Path, kind: Any) -> None:
    folder = make_folder(tmp_path / "model", kind, tied=False)
    network = build_network(
        CausalModel.model_validate({"path": str(folder)}), seed=0, is_sharded=False
    )
    network.eval()
    choice = asked(write_rows(tmp_path / "rows.jsonl", rows_of("choice")), "choice")
    questions = read(choice, folder)
    is_best = []
    with torch.no_grad():
        for question in questions:
            of_choices = []
            for tokens, start in question.choices:
                assert list(tokens[:start]) == list(question.prompt)
                scores = network(torch.tensor([tokens]))[0].log_softmax(dim=1)
                places = range(start, len(tokens))
                of_choices.append(sum(scores[at - 1, tokens[at]].item() for at in places))
            is_best.append(max(of_choices) == of_choices[1])
        examination = Examination(questions, choice, Prompts(str(folder)), batch_size=6)
        found = examination.run(network, Worker(device=CPU), is_sharded=False)
    assert found == (sum(is_best), 7)
    # The answers are shown in the order of the file.
    shown = [each.to_json() for each in examination.shown]
    assert [each["question"] for each in shown] == [row["prompt"] for row in ROWS]
    assert [each["is_right"] for each in shown] == [each["given"] == " no" for each in shown]
    assert [each["is_right"] for each in shown] == is_best


@pytest.mark.parametrize("match", ["regex", "choice"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_workers_divide_the_questions_among_them(
    tmp_path: Path, model: Path, match: str, is_sharded: bool
) -> None:
    network = build_network(
        CausalModel.model_validate({"path": str(model)}), seed=0, is_sharded=False
    )
    network.eval()
    settings = asked(write_rows(tmp_path / "rows.jsonl", rows_of(match)), match)
    questions = read(settings, model)
    counts: list[list[int]] = [[], []]
    prompts = Prompts(str(model))

    def run(worker: Worker, calls: list[int]) -> tuple[int, int]:
        def counted(*arguments: Any, **options: Any) -> torch.Tensor:
            calls.append(1)
            with torch.no_grad():
                return network(*arguments, **options)

        examination = Examination(questions, settings, prompts, batch_size=3)
        return examination.run(counted, worker, is_sharded=is_sharded)

    alone = run(Worker(device=CPU), [])
    both = Group(2).run(lambda worker: run(worker, counts[worker.rank]))
    assert tuple(map(sum, zip(*both, strict=True))) == alone
    assert [asked for _, asked in both] == [4, 3]
    if match == "regex":
        assert alone == (4, 7)
    if is_sharded:
        assert len(counts[0]) == len(counts[1])


def test_the_report_shows_the_answers_as_text_and_no_tags() -> None:
    shown = [{"question": "1 < 2?", "answer": "<b>yes</b>", "given": "no", "is_right": False}]
    found = table(ANSWER_COLUMNS, answer_rows(shown))
    assert "<td>1 &lt; 2?</td><td>&lt;b&gt;yes&lt;/b&gt;</td><td>no</td><td>wrong</td>" in found


# Runs.


@pytest.mark.parametrize("adapter", [None, LORA], ids=["all weights", "adapter"])
def test_questions_leave_the_weights_as_they_are(
    tmp_path: Path, model: Path, chats: Path, adapter: dict[str, Any] | None
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", rows_of("regex"))
    changes = {"train__model__adapter": adapter, "train__prompts": ["What is 1 plus 1?"]}
    without = causal_config(tmp_path / "without", model, chats, **changes)
    config = causal_config(
        tmp_path / "with",
        model,
        chats,
        **changes,
        train__questions={"path": str(file), "match": "regex", "max_tokens": 4},
        train__early_stopping={"metric": "val_accuracy", "patience_epochs": 5},
        checkpoint__best="val_accuracy",
    )
    train_here(without)
    train_here(config)
    assert same(final_weights(config), final_weights(without))
    found = [line["val_accuracy"] for line in metrics(config, "epoch")]
    assert found == pytest.approx([4 / 7, 4 / 7], abs=1e-6)
    assert "accuracy" not in metrics(config)[-1]
    folder = open_folder(config)
    checkpoint = resume.choose(folder)
    assert checkpoint is not None
    validation = Checkpoints(folder).load(checkpoint.name, VALIDATION)
    answers = validation[GIVEN_ANSWERS]
    assert [each["is_right"] for each in answers] == [True] * 4 + [False] * 3
    assert (answers[4]["question"], answers[4]["answer"]) == (ROWS[4]["prompt"], "no such")
    end = AttemptEnd(attempt=1, resumed_from=None, last=resume.choose(folder), error=None)
    summary = summarise(config, folder, end)
    assert summary["val_accuracy"] == summary["best_val_accuracy"] == found[0]
    assert "accuracy" not in summary


@pytest.mark.ci
def test_copies_and_shards_answer_as_one_worker_does(
    tmp_path: Path, model: Path, chats: Path
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", rows_of("choice"))
    answers = write_rows(tmp_path / "answers.jsonl", rows_of("regex"))
    found = {}
    for match, path in (("choice", file), ("regex", answers)):
        changes = {
            "train__epochs": 1,
            "train__questions": {"path": str(path), "match": match, "max_tokens": 5},
        }
        alone = causal_config(tmp_path / f"{match}-one", model, chats, **changes)
        two = {**changes, "scaling__num_workers": 2}
        copied = causal_config(tmp_path / f"{match}-ddp", model, chats, **two)
        shared = causal_config(
            tmp_path / f"{match}-fsdp2", model, chats, **two, train__strategy="fsdp2"
        )
        train_here(alone)
        losses_of_steps(copied, shared)
        found[match] = [metrics(each)[-1]["val_accuracy"] for each in (alone, copied, shared)]
    assert found["choice"] == [found["choice"][0]] * 3
    assert found["regex"] == pytest.approx([4 / 7] * 3, abs=1e-6)


def test_a_metric_of_validations_alone_is_in_the_line_of_progress() -> None:
    progress = {"epoch": 2, "epochs": 3, "step": 9, "steps": 12, "loss": 0.5, "val_accuracy": 4 / 7}
    found = progress_text(progress | {"tokens_per_s": 1200, "eta_s": 60})
    assert found == (
        "epoch 2/3  step 9/12  loss 0.5000  validation accuracy 0.571  1,200 tokens/s  ETA 1:00"
    )


# What is refused before training.


@pytest.mark.parametrize(
    ("match", "row", "message"),
    [
        ("exact", {"question": "What?"}, "has the keys question; a row needs prompt, or messages"),
        ("exact", {"prompt": "What?"}, "answer is None; it has to be text"),
        ("exact", {"prompt": "What?", "answer": 4}, "answer is 4; it has to be text"),
        ("exact", {"prompt": "word " * 90, "answer": "a"}, "and train.context_length is 48"),
        ("regex", {"prompt": "What?", "answer": "("}, "answer is no regular expression"),
        ("choice", {"prompt": "What?", "answer": "a"}, "needs choices, a list of texts"),
        (
            "choice",
            {"prompt": "What?", "answer": "a", "choices": ["b"]},
            "'a' is none of the choices",
        ),
        ("choice", {"prompt": "What?", "answer": "", "choices": [""]}, "has no token behind"),
    ],
    ids=["keys", "no answer", "number", "too long", "pattern", "no choices", "other", "empty"],
)
def test_a_bad_question_is_told_with_its_line_before_training(
    tmp_path: Path, model: Path, chats: Path, match: str, row: dict[str, Any], message: str
) -> None:
    good = {"prompt": "What?", "answer": "a", "choices": ["a", "b"]}
    file = write_rows(tmp_path / "rows.jsonl", [good, row])
    config = causal_config(
        tmp_path, model, chats, train__questions={"path": str(file), "match": match}
    )
    with pytest.raises(ConfigError) as told:
        check(config)
    assert "train.questions.path" in str(told.value)
    assert f"{file}, line 2: " in str(told.value)
    assert message in str(told.value)


def test_without_questions_there_is_no_accuracy(tmp_path: Path, model: Path, chats: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint\.best = val_accuracy is no metric"):
        causal_config(tmp_path, model, chats, checkpoint__best="val_accuracy")
