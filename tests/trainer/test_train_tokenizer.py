"""`trainyard data tokenizer`: a byte-level BPE of a source's text, for AutoTokenizer and for runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("transformers")

from transformers import AutoTokenizer

from trainyard_trainer.data.sources.tokens.tokenizer_folder import TextTokenizer
from trainyard_trainer.tools.data import main

TEXTS = [f"the small horse and the old cow, number {number}, größer 你好\n" for number in range(50)]


def write_source(folder: Path, kind: str) -> Path:
    """Write the same texts as files of one kind, and return the source."""
    rows = [{"text": text} for text in TEXTS]
    folder.mkdir()
    if kind == "text folder":
        (folder / "a.txt").write_text("".join(TEXTS[:20]))
        (folder / "b.txt").write_text("".join(TEXTS[20:]))
        return folder
    path = folder / {"text file": "a.md", "lines": "a.jsonl", "Parquet": "a.parquet"}[kind]
    if kind == "text file":
        path.write_text("".join(TEXTS))
    elif kind == "lines":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def train(source: Path | str, out: Path, vocab_size: int = 300, *options: str) -> int:
    words = ["tokenizer", str(source), "--vocab-size", str(vocab_size), "--out", str(out)]
    return main([*words, *options])


def test_all_kinds_of_sources_give_the_same_files_which_autotokenizer_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for kind in ("text folder", "text file", "lines", "Parquet"):
        out = tmp_path / f"out of {kind}"
        assert train(write_source(tmp_path / kind, kind), out) == 0
        found.append({file.name: file.read_bytes() for file in sorted(out.iterdir())})
    assert found == [found[0]] * 4
    assert "300 tokens of" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (len(tokenizer), tokenizer.eos_token, tokenizer.pad_token) == (
        300,
        "<|endoftext|>",
        "<|pad|>",
    )
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1)
    own = TextTokenizer(str(out))
    assert (own.vocab_size, own.end_of_text) == (300, 0)
    for text in (*TEXTS, "never seen: \t🙂 .\n\n  x ,", "<|endoftext|>"):
        (tokens,) = own.encode([text])
        wanted = "" if text == "<|endoftext|>" else text
        assert own.decode(tokens) == wanted
    assert len(own.encode([TEXTS[0]])[0]) < len(TEXTS[0].encode()) / 2


@pytest.mark.parametrize(
    ("files", "vocab_size", "problem"),
    [
        ({"a.txt": "abc " * 9}, 400, r"give only \d+ tokens\. Use --vocab-size \d+, or more text"),
        (
            {"a.jsonl": '{"prompt": "a", "completion": "b"}'},
            300,
            "line 1: it is a chat or a prompt",
        ),
        ({"a.jsonl": '{"question": "a"}'}, 300, "line 1: it has the keys question"),
        ({"a.bin": "abc"}, 300, "is no source of chats"),
    ],
)
def test_what_gives_no_such_tokenizer_is_refused(
    tmp_path: Path,
    files: dict[str, str],
    vocab_size: int,
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name, content in files.items():
        (source / name).write_text(content)
    assert train(source, tmp_path / "out", vocab_size) == 2
    assert re.search(problem, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_source(tmp_path / "source", "text folder")
    assert train(source, source) == 2
    assert "holds something" in capsys.readouterr().err
