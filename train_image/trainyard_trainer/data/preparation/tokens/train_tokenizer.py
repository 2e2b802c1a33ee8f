"""Train a byte-level BPE tokenizer on text, and write it as a folder that `AutoTokenizer` reads."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from pyarrow import fs

from trainyard_trainer.config.data.sources import BUILT_IN
from trainyard_trainer.data.sources.chats.chat_files import ChatFiles
from trainyard_trainer.data.sources.chats.examples import TextExample, WrongRow, example_of
from trainyard_trainer.data.sources.listing import SOURCE_KEYS, find_root, list_all
from trainyard_trainer.data.sources.parts import ALL
from trainyard_trainer.data.sources.tokens.byte_rows import PATTERN, find_text
from trainyard_trainer.data.sources.tokens.text_pieces import pieces_of
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.storage import open_filesystem

END_OF_TEXT, PADDING_TOKEN = "<|endoftext|>", "<|pad|>"
"""The special tokens, which have the ids 0 and 1."""

FEWEST_USES = 2
"""The number of times that two tokens have to follow each other to become one."""

TEXT_ENDINGS = ("*.txt", "*.md", "*.text")
"""The names of files that are read as text where no pattern says which are."""


def train_tokenizer(
    source: str,
    out: Path,
    *,
    vocab_size: int,
    pattern: str | None,
    endpoint: str | None,
    say: Callable[[str], None],
) -> int:
    """Train a tokenizer and write its folder; return the number of bytes of text that were read.

    The same text gives the same files. Raises ConfigError if the folder holds something, if the source has
    no text, or too little for so many tokens.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out = {out} holds something. Name a new or an empty folder.")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    num_bytes = 0

    def counted() -> Iterator[str]:
        nonlocal num_bytes
        for text in texts_of(source, endpoint=endpoint, pattern=pattern, say=say):
            num_bytes += len(text.encode())
            yield text

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=FEWEST_USES,
        show_progress=False,
        special_tokens=[END_OF_TEXT, PADDING_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(counted(), trainer)
    found = bpe.get_vocab_size()
    if found < vocab_size:
        raise ConfigError(
            f"--vocab-size = {vocab_size:,}: the {num_bytes:,} bytes of text of {source} give only {found:,} "
            f"tokens. Use --vocab-size {found}, or more text."
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TEXT,
        pad_token=PADDING_TOKEN,
        clean_up_tokenization_spaces=False,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        # Renamed into place, so that a folder is whole or not there.
        folder = Path(scratch, "tokenizer")
        tokenizer.save_pretrained(folder)
        folder.rename(out)
    return num_bytes


def texts_of(
    source: str, *, endpoint: str | None, pattern: str | None, say: Callable[[str], None]
) -> Iterator[str]:
    """Yield the texts of a source: pieces of text files, or the rows of files with a column `text`.

    Of rows that are split, those for training are read. Raises ConfigError for a source without text.
    """
    if pattern is not None or source in BUILT_IN or _is_of_text_files(source, endpoint):
        files = find_text(source, endpoint=endpoint, pattern=pattern, say=say)
        documents = files.documents(0)[ALL]
        yield from (piece.text for piece in pieces_of(files.filesystem, documents))
        return
    rows = ChatFiles.open(source, endpoint)
    for row in rows.rows("train" if rows.is_split else None):
        try:
            if row.problem is not None:
                raise WrongRow(row.problem)
            example = example_of(row.row)
            if not isinstance(example, TextExample):
                raise WrongRow("it is a chat or a prompt, and has no text of its own (key text)")
        except WrongRow as reason:
            raise ConfigError(f"{row.location}: {reason}") from None
        yield example.text


def _is_of_text_files(source: str, endpoint: str | None) -> bool:
    """Return whether a source is a file of text by its name, or a folder with such files."""
    filesystem, root = open_filesystem(source, endpoint, names=SOURCE_KEYS)
    info = find_root(source, filesystem, root, endpoint)
    if info.type == fs.FileType.File:
        return any(fnmatch(info.base_name, each) for each in TEXT_ENDINGS)
    return any(fnmatch(each.base_name, PATTERN) for each in list_all(filesystem, root))
