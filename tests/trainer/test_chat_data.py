"""Chats, prompts and texts as rows of tokens: layouts, what is learnt, packing, resuming, bad rows."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import made_sources
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from s3_server import Bucket

pytest.importorskip("transformers")

from transformers import AutoTokenizer

from tests.support.tiny_models import (
    PLAIN_TEMPLATE,
    TEMPLATE,
    TOOL_TEMPLATE,
    make_folder,
    make_tokenizer_folder,
)
from trainyard_trainer.config.data.section import Data
from trainyard_trainer.data.loading.local_copy import LocalCopy
from trainyard_trainer.data.preparation.context import PrepareContext
from trainyard_trainer.data.preparation.run_data import open_data
from trainyard_trainer.data.preparation.tokens import chunk_processes, token_chunks
from trainyard_trainer.data.preparation.tokens import prepare_tokens as preparation
from trainyard_trainer.data.preparation.tokens.prepare_tokens import TokenOptions, prepare_tokens
from trainyard_trainer.data.prepared import (
    PADDING,
    STARTS_DOCUMENT,
    Prepared,
    TokenInfo,
    read_prepared,
)
from trainyard_trainer.data.sources.chats.examples import example_of
from trainyard_trainer.data.sources.chats.packing import pack
from trainyard_trainer.data.sources.chats.token_format import TokenFormat
from trainyard_trainer.data.sources.chats.tokenizer import ChatTokenizer
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.tools.data import main
from trainyard_trainer.tools.inspection.tokens import tokens_as_text

QUESTION, ANSWER = "What is 1 plus 2?", "It is 3."
LONG = "word " * 400
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": QUESTION}
ASSISTANT = {"role": "assistant", "content": ANSWER}
TOOL_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "two turns": [USER, ASSISTANT, USER, ASSISTANT],
    "system prompt": [SYSTEM, USER, ASSISTANT],
    "empty turns": [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": ""},
        USER,
        ASSISTANT,
    ],
    "unicode": [
        {"role": "user", "content": "Grüße 🙂 你好"},
        {"role": "assistant", "content": "नमस्ते — ok"},
    ],
    "long": [{"role": "user", "content": LONG}, {"role": "assistant", "content": LONG}],
}


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tokenizer_folder(tmp_path_factory.mktemp("t") / "marked", template=TEMPLATE))


@pytest.fixture(scope="module")
def unmarked(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("t") / "unmarked"
    return str(make_tokenizer_folder(folder, template=PLAIN_TEMPLATE))


def layouts_of(messages: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same chat in each of the layouts that can hold it."""
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    turns = [{"from": names[each["role"]], "value": each["content"]} for each in messages]
    found: dict[str, dict[str, Any]] = {
        "messages": {"messages": messages},
        "conversations": {"conversations": turns},
        "prompt": {"prompt": messages[:-1], "completion": messages[-1:]},
    }
    if [each["role"] for each in messages] == ["system", "user", "assistant"]:
        system, user, assistant = (each["content"] for each in messages)
        found["instruction"] = {"instruction": user, "output": assistant, "system": system}
        found["sharegpt system"] = {"conversations": turns[1:], "system": system}
    return found


# Layouts and masks.


@pytest.mark.parametrize("chat", CHATS)
def test_a_chat_has_the_tokens_and_the_mask_of_its_template_in_every_layout(
    marked: str, unmarked: str, chat: str
) -> None:
    own = AutoTokenizer.from_pretrained(marked)
    wanted = own.apply_chat_template(
        CHATS[chat], return_dict=True, return_assistant_tokens_mask=True
    )
    for folder in (marked, unmarked):
        tokenizer = ChatTokenizer(folder, "answers")
        for layout, row in layouts_of(CHATS[chat]).items():
            found = tokenizer.tokens_of(example_of(row))
            assert found.ids == wanted["input_ids"], layout
            if layout != "prompt":
                assert found.is_learnt == wanted["assistant_masks"], (folder, layout)


def test_calls_of_tools_are_learnt_and_tools_are_shown(tmp_path: Path) -> None:
    folder = str(make_tokenizer_folder(tmp_path / "tools", template=TOOL_TEMPLATE))
    own = AutoTokenizer.from_pretrained(folder)
    messages = [USER, TOOL_CALL, {"role": "tool", "content": "3"}, ASSISTANT]
    tools = [{"type": "function", "function": {"name": "add"}}]
    wanted = own.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    # As Arrow reads such chats: each message has the keys of all, without values.
    as_read = [{"tool_calls": None, "content": None} | message for message in messages]
    for given_tools in (tools, json.dumps(tools)):
        row = {"messages": as_read, "tools": given_tools}
        found = ChatTokenizer(folder, "answers").tokens_of(example_of(row))
        assert (found.ids, found.is_learnt) == (wanted["input_ids"], wanted["assistant_masks"])


@pytest.mark.parametrize("kind", ["trimming marks", "several templates", "parts"])
def test_the_mask_is_that_of_the_template_however_it_is_written(tmp_path: Path, kind: str) -> None:
    template: Any = TEMPLATE
    chat = CHATS["two turns"]
    if kind == "trimming marks":
        template = TEMPLATE.replace("{% generation %}", "{%- generation -%}")
    if kind == "several templates":
        template = {"default": TEMPLATE, "tool_use": TOOL_TEMPLATE}
    if kind == "parts":
        template = TEMPLATE.replace("message['content']", "message['content'][0]['text']")
        chat = [
            each | {"content": [{"type": "text", "text": each["content"], "image": None}]}
            for each in chat
        ]
    folder = str(make_tokenizer_folder(tmp_path / "model", template=template))
    own = AutoTokenizer.from_pretrained(folder)
    tools = [{"type": "function", "function": {"name": "add"}}] if "several" in kind else None
    wanted = own.apply_chat_template(
        chat, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    row = {"messages": chat, "tools": tools}
    found = ChatTokenizer(folder, "answers").tokens_of(example_of(row))
    assert (found.ids, found.is_learnt) == (wanted["input_ids"], wanted["assistant_masks"])
    assert sum(found.is_learnt) > 5


def test_of_a_prompt_the_completion_is_learnt_and_of_text_everything(marked: str) -> None:
    tokenizer = ChatTokenizer(marked, "answers")
    own = AutoTokenizer.from_pretrained(marked)
    found = tokenizer.tokens_of(example_of({"prompt": "1 + 2 =", "completion": " 3"}))
    learnt = [token for token, is_learnt in zip(*found, strict=True) if is_learnt]
    assert own.decode(learnt) == " 3<|im_end|>"
    text = tokenizer.tokens_of(example_of({"text": "some text"}))
    assert own.decode(text.ids) == "some text<|im_end|>"
    assert set(text.is_learnt) == {1}


TRL_ROWS: dict[str, list[dict[str, Any]]] = {
    "messages": [{"messages": messages} for messages in CHATS.values()],
    "prompts of text": [
        {"prompt": "1 + 2 =", "completion": " 3"},
        {"prompt": "def add(a, b", "completion": "):\n    return a + b"},
        {"prompt": "Grüße ", "completion": "你好"},
    ],
    "prompts of messages": [
        {"prompt": messages[:-1], "completion": messages[-1:]} for messages in CHATS.values()
    ],
    "text": [{"text": "some text"}, {"text": "ends by itself<|im_end|>"}, {"text": LONG}],
}


@pytest.mark.ci
@pytest.mark.parametrize("loss_on", ["answers", "all"])
@pytest.mark.parametrize("layout", TRL_ROWS)
def test_tokens_and_what_is_learnt_are_those_of_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, loss_on: Literal["answers", "all"]
) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    folder = str(make_folder(tmp_path / "model"))
    rows = TRL_ROWS[layout]
    # An own option of each layout: what TRL may be told depends on the columns.
    own: dict[str, Any] = {"assistant_only_loss": loss_on == "answers" and layout == "messages"}
    if "prompts" in layout:
        own["completion_only_loss"] = loss_on == "answers"
    settings = trl.SFTConfig(
        output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False, max_length=None, **own
    )
    trainer = trl.SFTTrainer(model=folder, args=settings, train_dataset=Dataset.from_list(rows))
    tokenizer = ChatTokenizer(folder, loss_on)
    for number, (row, wanted) in enumerate(zip(rows, trainer.train_dataset, strict=True)):
        found = tokenizer.tokens_of(example_of(row))
        assert list(found.ids) == wanted["input_ids"], number
        labels = [token if is_learnt else -100 for token, is_learnt in zip(*found, strict=True)]
        assert labels == wanted["labels"], number


# Packing.


@given(st.lists(st.integers(1, 64), min_size=1, max_size=200))
def test_no_row_is_too_long_and_no_two_rows_could_be_one(lengths: list[int]) -> None:
    rows = pack(np.array(lengths), 64)
    sums = np.bincount(rows, weights=lengths)
    assert sums.max() <= 64
    assert sums.min() > 0
    smallest = np.sort(sums)[:2]
    assert len(sums) == 1 or smallest.sum() > 64


# Prepared data.


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def form_of(tokenizer: str, **settings: Any) -> TokenFormat:
    known: dict[str, Any] = {
        "context_length": 64,
        "packing": True,
        "loss_on": "answers",
        "too_long": "truncate",
    }
    return TokenFormat(tokenizer=tokenizer, folder=tokenizer, **known | settings)


def prepare(
    tmp_path: Path,
    source: Path,
    tokenizer: str,
    *,
    context: PrepareContext | None = None,
    valid_source: Path | None = None,
    **form: Any,
) -> Prepared:
    options = TokenOptions(
        source=str(source),
        valid_source=str(valid_source) if valid_source else None,
        valid_share=0.2,
        form=form_of(tokenizer, **form),
    )
    dest = RunFolder.open(str(tmp_path), "data")
    prepare_tokens(options, dest, context or PrepareContext(owns_destination=True))
    return read_prepared(dest, path=str(tmp_path / "data"), endpoint=None)


def rows_of(data: Prepared, split: Any) -> tuple[np.ndarray, np.ndarray]:
    count = data.num_train if split == "train" else data.num_valid
    batch = LocalCopy(data, getattr(data, split), is_pinned=False)[np.arange(count)]
    return batch["tokens"].numpy(), batch["flags"].numpy()


def documents(data: Prepared) -> list[tuple[int, ...]]:
    """The tokens of all documents of both splits, sorted."""
    found = []
    for split in ("train", "valid"):
        for tokens, flags in zip(*rows_of(data, split), strict=True):
            starts = np.flatnonzero(flags & STARTS_DOCUMENT)
            for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
                if not flags[start] & PADDING:
                    found.append(tuple(tokens[start:end].tolist()))
    return sorted(found)


def info_of(data: Prepared) -> TokenInfo:
    assert isinstance(data.info, TokenInfo)
    return data.info


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_every_row_of_the_source_is_a_document_once(
    tmp_path: Path, marked: str, packing: bool
) -> None:
    rows = [{"text": f"row {number} " * (number % 4 + 1)} for number in range(50)]
    source = write_lines(tmp_path / "rows.jsonl", rows)
    data = prepare(tmp_path, source, marked, packing=packing)
    tokenizer = ChatTokenizer(marked, "answers")
    wanted = sorted(tuple(tokenizer.tokens_of(example_of(row)).ids) for row in rows)
    assert documents(data) == wanted
    info = info_of(data)
    assert info.train.source_rows + info.valid.source_rows == 50
    assert info.valid.source_rows == 10
    assert info.train.tokens + info.valid.tokens == sum(map(len, wanted))
    if packing:
        assert info.row_tokens == 64
        assert info.train.fill_rate > 0.8
    else:
        assert data.num_train + data.num_valid == 50
        assert info.row_tokens == -(-max(map(len, wanted)) // 8) * 8


def _as_parquet(folder: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=7)
    return folder / "rows.parquet"


def _as_datasets(folder: Path, rows: list[dict[str, Any]]) -> Path:
    from datasets import Dataset

    Dataset.from_list(rows).save_to_disk(folder / "saved", num_shards=2)
    return folder / "saved"


def _as_list(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder / "rows.json"


def _as_lines(folder: Path, rows: list[dict[str, Any]]) -> Path:
    return write_lines(folder / "rows.jsonl", rows)


@pytest.mark.parametrize("write", [_as_parquet, _as_datasets, _as_list])
def test_all_kinds_of_files_give_the_same_rows_as_json_lines(
    tmp_path: Path, marked: str, write: Callable[[Path, list[dict[str, Any]]], Path]
) -> None:
    rows = [
        {"messages": [SYSTEM, USER, {"role": "assistant", "content": f"{number}"}]}
        for number in range(20)
    ]
    found = []
    for form in (_as_lines, write):
        place = tmp_path / form.__name__
        place.mkdir()
        found.append(documents(prepare(place, form(place, rows), marked)))
    assert found[0] == found[1]


def test_files_named_train_and_valid_are_the_splits(tmp_path: Path, marked: str) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    write_lines(folder / "train.jsonl", [{"text": "to train"}] * 5)
    write_lines(folder / "valid.jsonl", [{"text": "to validate"}] * 3)
    info = info_of(prepare(tmp_path, folder, marked))
    assert (info.train.source_rows, info.valid.source_rows) == (5, 3)
    other = tmp_path / "other"
    other.mkdir()
    single = write_lines(tmp_path / "single.jsonl", [{"text": "to train"}] * 4)
    info = info_of(prepare(other, single, marked, valid_source=folder))
    assert (info.train.source_rows, info.valid.source_rows) == (4, 3)


@pytest.mark.parametrize(
    ("too_long", "counts"),
    [
        ("truncate", {"truncated_rows": 1, "split_rows": 0, "samples": 4, "longest_sample": 64}),
        ("split", {"truncated_rows": 0, "split_rows": 1, "longest_sample": 64}),
    ],
)
def test_what_is_too_long_is_cut_or_split_and_counted(
    tmp_path: Path, marked: str, too_long: str, counts: dict[str, int]
) -> None:
    rows = [{"text": "short"}, {"text": LONG}, {"text": "short"}, {"text": "short"}]
    folder = tmp_path / "source"
    folder.mkdir()
    write_lines(folder / "train.jsonl", rows)
    write_lines(folder / "valid.jsonl", rows[:1])
    info = info_of(prepare(tmp_path, folder, marked, too_long=too_long))
    assert {key: getattr(info.train, key) for key in counts} == counts
    length = len(ChatTokenizer(marked, "answers").tokens_of(example_of(rows[1])).ids)
    assert info.train.truncated_tokens == (length - 64 if too_long == "truncate" else 0)


def test_samples_without_a_token_to_learn_are_left_out_and_counted(
    tmp_path: Path, marked: str
) -> None:
    only_asked = {"messages": [{"role": "user", "content": LONG}, ASSISTANT]}
    folder = tmp_path / "source"
    folder.mkdir()
    write_lines(folder / "train.jsonl", [only_asked, {"messages": [USER, ASSISTANT]}])
    write_lines(folder / "valid.jsonl", [{"messages": [USER, ASSISTANT]}])
    info = info_of(prepare(tmp_path, folder, marked))
    assert (info.train.samples, info.train.left_out) == (1, 1)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_source_and_destination_may_be_in_a_bucket(
    tmp_path: Path, marked: str, bucket: Bucket, packing: bool
) -> None:
    rows = [{"messages": [USER, {"role": "assistant", "content": f"{each}"}]} for each in range(30)]
    here = prepare(tmp_path, write_lines(tmp_path / "rows.jsonl", rows), marked, packing=packing)
    place = RunFolder.open(bucket.path, f"chats-{packing}", bucket.endpoint)
    place.write(f"{place.root}/source/rows.jsonl", (tmp_path / "rows.jsonl").read_bytes())
    options = TokenOptions(
        source=f"{bucket.path}/chats-{packing}/source",
        valid_source=None,
        valid_share=0.2,
        form=form_of(marked, packing=packing),
    )
    dest = RunFolder(place.filesystem, place.data)
    prepare_tokens(options, dest, PrepareContext(endpoint=bucket.endpoint, owns_destination=True))
    there = read_prepared(dest, path=dest.show(dest.root), endpoint=bucket.endpoint)
    assert documents(there) == documents(here)
    assert there.info == replace(here.info, source=options.source)


# Inspection.


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_samples_are_shown_as_text_with_the_learnt_tokens_marked(
    tmp_path: Path, marked: str, packing: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [{"messages": [USER, ASSISTANT]}] * 20)
    data = prepare(tmp_path, source, marked, packing=packing)
    assert main(["inspect", str(tmp_path / "data")]) == 0
    shown = capsys.readouterr().out
    assert (
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n[{ANSWER}<|im_end|>]"
        in shown
    )
    assert "rows of the source" in shown
    coloured = tokens_as_text(data, info_of(data), has_colour=True)
    assert f"\033[32m{ANSWER}<|im_end|>\033[0m" in coloured
    assert main(["inspect", str(tmp_path / "data"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["train"]["source_rows"] == 16


# Resuming.


class Killed(Exception):
    """Stands for the end of the process in the middle of a preparation."""


@pytest.mark.parametrize("stage", ["first chunk", "third chunk", "first file", "description"])
def test_a_preparation_that_was_killed_ends_with_the_same_bytes(
    tmp_path: Path, marked: str, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    monkeypatch.setattr(token_chunks, "CHUNK_ROWS", 8)
    monkeypatch.setattr(preparation, "FILE_BYTES", 2000)
    source = write_lines(
        tmp_path / "rows.jsonl", [{"text": f"row {number} " * 5} for number in range(40)]
    )
    prepare(tmp_path / "whole", source, marked)
    last = {
        "first chunk": "all-00000.json",
        "third chunk": "all-00002.tokens",
        "first file": "part-00000.parquet",
        "description": "dataset.json",
    }[stage]
    write = RunFolder.write

    def write_until_killed(self: RunFolder, path: str, data: str | bytes) -> None:
        if path.endswith(last):
            raise Killed
        write(self, path, data)

    with patch.object(RunFolder, "write", write_until_killed), pytest.raises(Killed):
        prepare(tmp_path / "cut", source, marked)
    prepare(tmp_path / "cut", source, marked)
    whole = files_in(tmp_path / "whole")
    assert len(whole) > 3
    assert files_in(tmp_path / "cut") == whole


def files_in(folder: Path) -> dict[Path, bytes]:
    return {
        file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()
    }


@pytest.mark.ci
def test_several_processes_make_the_bytes_that_one_makes(
    tmp_path: Path, marked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_chunks, "CHUNK_ROWS", 4)
    rows = [{"messages": CHATS["two turns"]}, {"text": "a row of text"}] * 20
    source = write_lines(tmp_path / "rows.jsonl", rows)
    prepare(tmp_path / "one", source, marked)
    monkeypatch.setattr(chunk_processes, "MADE_HERE", 2)
    context = PrepareContext(owns_destination=True, processes=2)
    prepare(tmp_path / "several", source, marked, context=context)
    assert files_in(tmp_path / "several") == files_in(tmp_path / "one")
    # A bad row behind those of this process ends the preparation, and the processes with it.
    write_lines(tmp_path / "bad.jsonl", [*rows, {"text": 3}, *rows])
    with pytest.raises(ConfigError, match=r"line 41: "):
        prepare(tmp_path / "bad", tmp_path / "bad.jsonl", marked, context=context)
    assert not multiprocessing.active_children()


# Bad input.


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"question": "a", "answer": "b"}',
            r"line 3: it has the keys question, answer; a row needs",
        ),
        ("no json", r"line 3: it is no JSON"),
        ('{"text": "a", "text": "b"}', r"line 3: it is no JSON: the key 'text' is there twice"),
        ('{"messages": []}', r"line 3: messages is empty"),
        (
            '{"messages": [{"role": "user"}]}',
            r"line 3: message 1 of messages, from user, has no content",
        ),
        ('{"conversations": [{"from": "alien", "value": "x"}]}', r"is from 'alien'; known are"),
        ('{"prompt": "x", "completion": 3}', r"completion a value of type int"),
        ('{"text": ["a"]}', r"text is a list, not text"),
        ('["a"]', r"it is no object with keys, but a list"),
        ('{"text": "a \\ud83d b"}', r"it has '\\ud83d', half of a character"),
        ('{"text": "a", "x": ' + "[" * 600 + "]" * 600 + "}", r"line 3: its values are nested"),
    ],
    ids=[
        *("keys", "no JSON", "repeated", "empty", "no content", "role", "types", "text", "list"),
        *("half a character", "nested"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_file_and_line(
    tmp_path: Path, marked: str, line: str, message: str
) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(f'{{"text": "a b c"}}\n{{"text": "a b c"}}\n{line}\n{{"text": "a b"}}\n')
    with pytest.raises(ConfigError, match=message) as error:
        prepare(tmp_path, source, marked)
    assert "rows.jsonl" in str(error.value)
    allowed = PrepareContext(owns_destination=True, max_bad_samples=1)
    data = prepare(tmp_path, source, marked, context=allowed)
    assert data.bad_samples == 1
    assert len(documents(data)) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "its train split has no sample: 0 rows could be used"),
        ("\n \n\r\n", "its train split has no sample: 0 rows could be used"),
        ('{"text": "one row"}\n', "its valid split has no sample"),
        ("no json\n", "its train split has no sample: 0 rows could be used"),
    ],
    ids=["empty", "blank lines", "one row", "bad rows only"],
)
def test_a_source_with_too_few_rows_is_refused(
    tmp_path: Path, marked: str, content: str, message: str
) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(content)
    allowed = PrepareContext(owns_destination=True, max_bad_samples=1)
    with pytest.raises(ConfigError, match=message):
        prepare(tmp_path, source, marked, context=allowed)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_chats_in_another_encoding_are_refused_by_its_cause(
    tmp_path: Path, marked: str, encoding: str
) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_bytes(('{"text": "a b"}\n' * 10).encode(encoding))
    with pytest.raises(ConfigError, match="is no text in UTF-8"):
        prepare(tmp_path, source, marked)


def test_bad_rows_end_a_preparation_before_the_rest_is_tokenised(
    tmp_path: Path, marked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_chunks, "CHUNK_ROWS", 2)
    source = tmp_path / "rows.jsonl"
    source.write_text('no json\n{"text": "a b"}\n' + '{"text": "a b"}\n' * 10)
    with pytest.raises(ConfigError, match="rows that cannot be used: 1, where"):
        prepare(tmp_path, source, marked)
    state = tmp_path / "data" / ".prepare"
    assert [path.name for path in sorted(state.glob("all-*.json"))] == ["all-00000.json"]


def test_chunks_have_a_bounded_size(
    tmp_path: Path, marked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": "a b c " * 20}] * 12
    whole = documents(prepare(tmp_path, write_lines(tmp_path / "rows.jsonl", rows), marked))
    monkeypatch.setattr(token_chunks, "CHUNK_BYTES", 300)
    for write in (_as_lines, _as_parquet, _as_list):
        folder = tmp_path / write.__name__
        folder.mkdir()
        chunks: list[int] = []
        context = PrepareContext(
            owns_destination=True,
            show=lambda stage, done, total, seen=chunks: seen.append(done),  # type: ignore[misc]
        )
        assert documents(prepare(folder, write(folder, rows), marked, context=context)) == whole
        assert len([done for done in chunks if done <= 12]) >= 3


def test_prepared_data_of_another_kind_are_refused(tmp_path: Path, marked: str) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [{"text": "a b c"}] * 10)
    prepare(tmp_path, source, marked)
    folder = RunFolder.open(str(tmp_path), "run")
    known: dict[str, Any] = {"storage_endpoint": None, "say": print}
    data = Data(source=str(tmp_path / "data"))
    with pytest.raises(ConfigError, match="holds tokens, which only recipe causal_lm"):
        open_data(data, folder, form={}, **known)
    found = open_data(data, folder, form={"tokens": form_of(marked)}, **known)
    assert isinstance(found.info, TokenInfo)
    images = made_sources.write_idx(
        tmp_path / "idx", "train", made_sources.pixels(20), made_sources.labels(20)
    ).parent
    open_data(Data(source=str(images)), folder, form={}, **known)
    with pytest.raises(ConfigError, match="holds images, and recipe causal_lm trains on tokens"):
        open_data(Data(source=folder.data), folder, form={"tokens": form_of(marked)}, **known)


def test_too_many_tokens_are_refused_where_the_run_says_so(tmp_path: Path, marked: str) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [{"text": "short"}, {"text": LONG}])
    with pytest.raises(ConfigError, match=r"line 2: it has \d+ tokens, and train.context_length"):
        prepare(tmp_path, source, marked, too_long="refuse")


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (None, {"messages": [USER, ASSISTANT]}, "has no chat template"),
        ("{{ raise_exception('no!') }}", {"messages": [USER, ASSISTANT]}, "chat template fails"),
        ("{{ nothing.at.all }}", {"messages": [USER, ASSISTANT]}, "chat template fails"),
        (
            "{% for m in messages %}{{ loop.revindex }}{{ m['content'] | length }}{% endfor %}",
            {"messages": [USER, ASSISTANT, USER, ASSISTANT]},
            "renders the first 2 messages in another way",
        ),
    ],
    ids=["none", "raises", "undefined", "from the end"],
)
def test_a_template_that_does_not_work_is_told(
    tmp_path: Path, template: str | None, row: dict[str, Any], message: str
) -> None:
    folder = str(make_tokenizer_folder(tmp_path / "model", template=template))
    source = write_lines(tmp_path / "rows.jsonl", [row] * 3)
    with pytest.raises(ConfigError, match=message):
        prepare(tmp_path, source, folder)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    source = write_lines(tmp_path / "rows.jsonl", [{"text": "a"}] * 3)
    with pytest.raises(ConfigError, match="has no tokenizer"):
        prepare(tmp_path, source, str(tmp_path / "model"))
