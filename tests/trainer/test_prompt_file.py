"""Answers to a file of prompts: the same in any batch, and beside the columns of each row."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import fs, parquet

from tests.trainer.causal_runs import causal_config, write_chats
from tests.trainer.training import open_folder, train_here

pytest.importorskip("transformers")

from transformers import AutoTokenizer

from tests.support.tiny_models import make_folder
from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.checkpointing.checkpoint import Checkpoints
from trainyard_trainer.config.training.models import CausalModel
from trainyard_trainer.data.prepared import TokenInfo
from trainyard_trainer.data.sources.chats.examples import question_of
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.causal_lm.weights import build_network
from trainyard_trainer.recipes.sampling import chosen_by
from trainyard_trainer.recipes.saved_model import Saved, deliver
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.tools.prediction.batch_prediction import Counts
from trainyard_trainer.tools.prediction.chat import Assistant
from trainyard_trainer.tools.prediction.prompt_file import PromptFile, answers_to

CPU = torch.device("cpu")
QUESTIONS = [f"What is {number} plus {'1' * (number % 4 + 1)}?" for number in range(9)]


def assistant_of(model: Path, *, tokens: dict[str, Any] | None = None, **options: Any) -> Assistant:
    """The model of a folder as a run that trained all weights has saved it, and what it knows of its data."""
    config = CausalModel.model_validate({"path": str(model)})
    saved = Saved(
        facts={"run": "chat", "recipe": "causal_lm", "model": config.model_dump()}
        | ({"tokens": tokens} if tokens else {}),
        weights=build_network(config, seed=0, is_sharded=False).state_dict(),
    )
    return Assistant(saved, CPU, **{"length": 8, "temperature": 0.0, "seed": 0} | options)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model") / "tiny")


def open_prompts(source: Path, out: Path, label: str | None = None) -> PromptFile:
    return PromptFile.open(
        str(source), RunFolder(fs.LocalFileSystem(), str(out)), str(out), None, label
    )


def answered(
    assistant: Assistant, source: Path, out: Path, *, part: int = 99, batch_size: int = 4
) -> tuple[Counts, list[dict[str, Any]]]:
    """What is written beside the rows of a file by all parts that need no Ray."""
    file = open_prompts(source, out)
    tables = [answers_to(assistant, each, batch_size=batch_size) for each in file.parts(part)]
    counts = file.write(pa.concat_tables(tables), "answer")
    if out.suffix == ".parquet":
        return counts, parquet.read_table(out).to_pylist()
    return counts, [json.loads(line) for line in out.read_text().splitlines()]


def write_prompts(path: Path) -> Path:
    path.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in QUESTIONS))
    return path


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_an_answer_does_not_depend_on_the_rows_that_are_read_with_it(
    tmp_path: Path, kind: Any, temperature: float
) -> None:
    assistant = assistant_of(
        make_folder(tmp_path / "model", kind, tied=False), temperature=temperature
    )
    source = write_prompts(tmp_path / "prompts.jsonl")
    found = [
        [
            row["predicted"]
            for row in answered(assistant, source, tmp_path / f"{part}.jsonl", part=part)[1]
        ]
        for part in (99, 5, 1)
    ]
    assert found[0] == found[1] == found[2]
    assert len({*found[0]}) > 2
    if temperature == 0:
        assert found[0] == [assistant.answer(each) for each in QUESTIONS]
    else:
        assert found[0][0] == assistant.answer(QUESTIONS[0])
        other = assistant_of(tmp_path / "model", temperature=1.0, seed=1)
        assert other.answer(QUESTIONS[0]) != found[0][0]


def test_tokens_are_chosen_as_often_as_the_scores_say() -> None:
    scores = torch.tensor([[0.7, 0.2, 0.1, 0.0]]).log().expand(100_000, 4)
    numbers = (torch.arange(100_000) + 0.5) / 100_000
    for temperature, wanted in (
        (1.0, [70_000, 20_000, 10_000, 0]),
        (0.5, [90_741, 7_407, 1_852, 0]),
    ):
        counts = torch.bincount(chosen_by(scores, temperature, numbers), minlength=4)
        assert counts.tolist() == pytest.approx(wanted, abs=2)


TURN = [{"role": "user", "content": "Add 1 and 1."}]
REPLY = [{"role": "assistant", "content": "That is 2."}]


@pytest.mark.parametrize(
    ("row", "prompt_as"),
    [
        ({"messages": TURN + REPLY}, "chat"),
        (
            {"conversations": [{"from": "human", "value": "1+1"}, {"from": "gpt", "value": "2"}]},
            "chat",
        ),
        ({"instruction": "Add 1 and 1.", "output": "That is 2."}, "chat"),
        ({"prompt": TURN, "completion": REPLY}, "chat"),
        ({"prompt": "Add 1 and 1.", "completion": " That is 2."}, "text"),
        ({"text": "1 and 1 is 2."}, "text"),
    ],
    ids=[
        "messages",
        "conversations",
        "instruction",
        "prompt of messages",
        "prompt of text",
        "text",
    ],
)
def test_a_prompt_is_written_as_in_the_rows_of_the_training_data(
    tmp_path: Path, model: Path, row: dict[str, Any], prompt_as: Any
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"{json.dumps(row)}\n" * 4)
    config = causal_config(tmp_path / "runs", model, rows)
    info = open_data(config, open_folder(config)).info
    assert isinstance(info, TokenInfo)
    assert info.prompt_as == prompt_as
    trained = assistant_of(model, tokens=asdict(info))
    own = AutoTokenizer.from_pretrained(model)
    text = own("What is 1 plus 1?").input_ids
    turn = own.apply_chat_template(
        [{"role": "user", "content": "What is 1 plus 1?"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    question = question_of({"prompt": "What is 1 plus 1?"})
    wanted = {"chat": turn, "text": text}
    assert trained.tokens_of(question) == wanted[prompt_as]
    for chosen, tokens in wanted.items():
        told = assistant_of(model, tokens=asdict(info), prompt_as=chosen)
        assert told.tokens_of(question) == tokens
        assert told.tokens_of(question_of({"messages": TURN})) != text


def test_prompts_as_turns_need_a_chat_template(tmp_path: Path, model: Path) -> None:
    plain = shutil.copytree(model, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"has no chat template.\n *Use --prompt-as text"):
        assistant_of(plain, prompt_as="chat")


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_row_without_an_answer_says_why_with_its_file_and_line(
    tmp_path: Path, model: Path, ending: str
) -> None:
    messages = [{"role": "user", "content": QUESTIONS[1]}]
    lines = [
        json.dumps({"prompt": QUESTIONS[0], "answer": " the\n", "id": 7}),
        "",
        json.dumps({"messages": messages, "id": 8}),
        json.dumps({"question": "What?"}),
        json.dumps({"prompt": "word " * 600}),
        json.dumps({"messages": [*messages, {"role": "assistant", "content": "It is 4."}]}),
        '{"prompt": "\\ud83d", "id": 9}',
        "{",
        "[1]",
    ]
    source = tmp_path / "prompts.jsonl"
    if ending == "parquet":
        lines[6] = '{"prompt": null}'  # Arrow has no half characters
    source.write_text("\n".join(lines))
    assistant = assistant_of(model)
    counts, found = answered(assistant, source, tmp_path / f"out.{ending}")
    errors = [row["error"] for row in found]
    assert errors[:2] == [None, None]
    assert errors[2] == (
        f"{source}, line 4: it has the keys question; a row needs prompt, or messages"
    )
    assert errors[3].startswith(f"{source}, line 5: it has ")
    assert "with --length 8 that is more than the 512 positions" in errors[3]
    assert "line 6: the last message of messages is the assistant's" in errors[4]
    assert "it is no JSON" in errors[-2]
    assert "it is no object with keys, but a list" in errors[-1]
    assert [row["predicted"] is None for row in found] == [error is not None for error in errors]
    assert found[0]["id"] == 7
    assert found[0]["predicted"] == assistant.answer(QUESTIONS[0])
    assert (counts.rows, counts.bad_rows) == (8, 6)
    assert (counts.labelled_rows, counts.agreeing_rows) == (1, 0)
    assert counts.first_error == errors[2]


def test_the_columns_of_a_table_keep_their_types(tmp_path: Path, model: Path) -> None:
    table = pa.table(
        {
            "prompt": QUESTIONS[:3],
            "number": pa.array([1, 2, 3], pa.uint8()),
            "when": pa.array([0, 1, 2], pa.timestamp("us")),
        }
    )
    parquet.write_table(table, tmp_path / "in.parquet")
    answered(assistant_of(model), tmp_path / "in.parquet", tmp_path / "out.parquet", part=2)
    found = parquet.read_table(tmp_path / "out.parquet")
    assert found.schema.names == ["prompt", "number", "when", "predicted", "error"]
    assert found.select(table.column_names) == table
    _, rows = answered(assistant_of(model), tmp_path / "in.parquet", tmp_path / "out.jsonl")
    assert rows[2]["when"] == "1970-01-01 00:00:00.000002"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "FILE = .*none.jsonl does not exist"),
        ("in.txt", "What?", "has to end in one of .jsonl, .ndjson, .json, .parquet, .arrow"),
        ("in.jsonl", "", "has no rows"),
        ("in.jsonl", '{"prompt": "a", "error": 1}', "already has a column error"),
        ("in.jsonl", '{"prompt": "a"}\n{"prompt": 1}', "column prompt fits no type of Parquet"),
        ("in.jsonl", '{"prompt": "a"}', r"has no column truth \(--label-column\)"),
    ],
    ids=["missing", "kind", "empty", "taken", "types", "label"],
)
def test_a_file_that_cannot_get_answers_is_refused_before_the_model_is_read(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    label = "truth" if "truth" in message else None
    with pytest.raises(ConfigError, match=message):
        open_prompts(tmp_path / name, tmp_path / "out.parquet", label)


@pytest.mark.slow
def test_ray_data_answers_what_the_prompt_alone_is_answered(tmp_path: Path, model: Path) -> None:
    config = causal_config(
        tmp_path / "runs", model, write_chats(tmp_path / "chats.jsonl"), train__epochs=1
    )
    train_here(config)
    folder = open_folder(config)
    deliver_newest(folder)
    source = write_prompts(tmp_path / "prompts.jsonl")
    with source.open("a") as file:
        file.write('{"prompt": "What is 1 plus 1?", "answer": "2"}\n{"question": "?"}\n')

    def predict(*words: str, code: int = 0) -> str:
        ended = subprocess.run(
            [sys.executable, "-m", "trainyard", "predict", folder.root, "--length=8", *words],
            capture_output=True,
            text=True,
        )
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    words = (str(source), f"--out={tmp_path}/answers.jsonl", "--temperature=0", "--batch-size=2")
    said = predict(*words, "--json")
    summary = json.loads(said[said.index("{") : said.rindex("}") + 1])
    assert (summary["rows"], summary["rows_without_prediction"]) == (11, 1)
    assert (summary["labelled_rows"], summary["agreement"]) == (1, 0.0)
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [row.get("prompt") for row in rows[:9]] == QUESTIONS
    alone = predict(f"--prompt={QUESTIONS[3]}", "--temperature=0")
    assert alone.startswith(rows[3]["predicted"])
    assert rows[10]["error"] == (
        f"{source}, line 11: it has the keys question; a row needs prompt, or messages"
    )
    assert "exists already" in predict(*words, code=2)
    raw = predict(f"--prompt={QUESTIONS[3]}", "--prompt-as=text", "--temperature=0")
    assert raw != alone


def deliver_newest(folder: RunFolder) -> None:
    """Deliver the newest checkpoint, as the end of a run does."""
    checkpoints = Checkpoints(folder)
    newest = checkpoints.newest()
    assert newest is not None
    deliver(folder, checkpoints, newest)
