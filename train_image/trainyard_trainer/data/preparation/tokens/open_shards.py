"""Open files of tokens where they lie: find and check them, once for each state of the files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from trainyard_trainer.config.data.section import Data
from trainyard_trainer.config.data.sources import absolute
from trainyard_trainer.data.prepared import StreamCounts, TokenStreamInfo
from trainyard_trainer.data.sources.tokens.stream_format import StreamFormat
from trainyard_trainer.data.sources.tokens.token_files import (
    TokenFile,
    TokenShards,
    check_ids,
    divide,
    open_token_file,
    stamp,
    token_paths,
)
from trainyard_trainer.data.sources.tokens.tokenizer_folder import (
    TOKENIZER_KEY,
    text_tokenizer,
    tokenizer_sha256,
)
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_folder.folder import RunFolder

CHECKED = "checked.json"
"""The record of the files whose ids were checked, which takes seconds for each 10 GB."""


def open_shards(
    data: Data,
    paths: Sequence[str],
    form: StreamFormat,
    folder: RunFolder,
    *,
    endpoint: str | None,
    say: Callable[[str], None],
) -> TokenShards:
    """Return the data set of files of tokens. Raises ConfigError if they do not fit the model.

    `paths` are the files of `data.source`.
    """
    if data.loader == "ray":
        raise ConfigError(
            "data.loader = ray does not read files of tokens, which workers map into memory. Use torch."
        )
    source = absolute(data.source)
    valid_source = absolute(data.valid_source) if data.valid_source else None
    valid_paths = token_paths(valid_source, endpoint) if valid_source else []
    splits = {
        name: tuple(map(open_token_file, files))
        for name, files in divide(source, paths, valid_source, valid_paths).items()
    }
    vocab_size, end_of_text, sha256 = form.vocab_size, form.end_of_text, None
    if form.tokenizer is not None:
        tokenizer = text_tokenizer(form.tokenizer)
        vocab_size, end_of_text = tokenizer.vocab_size, tokenizer.end_of_text
        sha256 = tokenizer_sha256(form.tokenizer, TOKENIZER_KEY)
    assert vocab_size is not None
    counts = {
        name: StreamCounts(tokens=sum(file.tokens for file in files))
        for name, files in splits.items()
    }
    found = TokenShards(
        info=TokenStreamInfo(
            source=source,
            row_tokens=form.context_length + 1,
            vocab_size=vocab_size,
            end_of_text=end_of_text,
            tokenizer=form.tokenizer,
            tokenizer_sha256=sha256,
            train=counts["train"],
            valid=counts["valid"],
        ),
        train=splits["train"],
        valid=splits["valid"],
    )
    for name, count in (("train", found.num_train), ("valid", found.num_valid)):
        if not count:
            raise ConfigError(
                f"{source}: no file of its {name} split has the {form.context_length + 1:,} tokens of a row. "
                "Use more tokens, or a smaller train.model.context_length."
            )
    _check_once([*found.train, *found.valid], vocab_size, folder, say)
    return found


def _check_once(
    files: Sequence[TokenFile], vocab_size: int, folder: RunFolder, say: Callable[[str], None]
) -> None:
    """Check all ids, unless an earlier attempt has checked the same files for the same vocabulary."""
    path = f"{folder.data}/{CHECKED}"
    wanted = {"stamp": stamp(files), "vocab_size": vocab_size}
    if folder.exists(path) and json.loads(folder.read(path)) == wanted:
        return
    say(f"files of tokens: {len(files):,}, tokens: {sum(file.tokens for file in files):,}")
    check_ids(files, vocab_size)
    folder.write(path, json.dumps(wanted))
