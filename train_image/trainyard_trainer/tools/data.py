"""Data sets and tokenizers by hand: `prepare SOURCE DEST`, `inspect SOURCE`, or `tokenizer SOURCE`.

python -m trainyard_trainer.tools.data prepare|inspect|tokenizer ARGUMENT...
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from trainyard_trainer.config.data.sources import absolute
from trainyard_trainer.config.tools.data_tools import DATA_INSPECT, DATA_PREPARE, DATA_TOKENIZER
from trainyard_trainer.config.training.recipes import CAUSAL_LM
from trainyard_trainer.data.preparation.context import PrepareContext
from trainyard_trainer.data.preparation.destination import is_finished
from trainyard_trainer.data.preparation.plan import Options
from trainyard_trainer.data.preparation.prepare import prepare
from trainyard_trainer.data.preparation.run_data import default_threads
from trainyard_trainer.data.preparation.tokens.prepare_stream import StreamOptions, prepare_stream
from trainyard_trainer.data.preparation.tokens.prepare_tokens import TokenOptions, prepare_tokens
from trainyard_trainer.data.preparation.tokens.train_tokenizer import train_tokenizer
from trainyard_trainer.data.prepared import Prepared, TokenInfo, TokenStreamInfo, read_prepared
from trainyard_trainer.data.sources.chats.token_format import TokenFormat
from trainyard_trainer.data.sources.columns import ImageColumns
from trainyard_trainer.data.sources.images.find import open_prepared
from trainyard_trainer.data.sources.tokens.stream_format import StreamFormat
from trainyard_trainer.data.sources.tokens.tokenizer_address import TokenizerAddress
from trainyard_trainer.data.sources.tokens.tokenizer_folder import load_tokenizer
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_files.programs.standard_streams import run_with_safe_streams
from trainyard_trainer.run_files.sizes import size_text
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.storage import open_filesystem
from trainyard_trainer.terminal import Bar
from trainyard_trainer.tools.command_line import exit_code_of, parse
from trainyard_trainer.tools.inspection import tables, tokens

TELL_S = 5.0
"""Between two lines of progress, where no terminal shows a bar."""


def main(arguments: list[str] | None = None) -> int:
    tool, wanted = parse(arguments, *COMMANDS)
    return exit_code_of(lambda: COMMANDS[tool](wanted))


class Preparation(NamedTuple):
    """What `data prepare` is asked to do."""

    options: Mapping[str, Any]
    """The options that decide the bytes of the data set."""
    write: Callable[[RunFolder, PrepareContext], None]
    """Writes the data set, or what is missing of it."""
    unit: str
    """What the source consists of."""


def _preparation(wanted: argparse.Namespace) -> Preparation:
    """Return the preparation that the arguments describe. Raises ConfigError without such a tokenizer."""
    sources = {
        "source": absolute(wanted.source),
        "valid_source": absolute(wanted.valid) if wanted.valid else None,
        "valid_share": wanted.valid_share,
    }
    if wanted.tokenizer is None:
        images = _image_options(wanted, sources)
        return Preparation(asdict(images), partial(prepare, images), "images")
    address = TokenizerAddress(
        path=absolute(wanted.tokenizer),
        endpoint=wanted.endpoint,
        names=("--tokenizer", "--endpoint"),
        say=_say,
    ).pinned()
    folder = address.folder()
    load_tokenizer(folder, "--tokenizer")
    if wanted.recipe == CAUSAL_LM:
        form = TokenFormat(
            tokenizer=address.path,
            folder=folder,
            context_length=wanted.context_length,
            packing=not wanted.padding,
            loss_on=wanted.loss_on,
            too_long=wanted.too_long,
            seed=wanted.seed,
        )
        rows = TokenOptions(**sources, form=form)
        return Preparation(rows.to_json(), partial(prepare_tokens, rows), "rows")
    text = StreamOptions(
        **sources,
        text_files=wanted.text_files,
        form=StreamFormat(
            tokenizer=address.path,
            folder=folder,
            context_length=wanted.context_length,
            seed=wanted.seed,
        ),
    )
    return Preparation(text.to_json(), partial(prepare_stream, text), "")


def _image_options(wanted: argparse.Namespace, sources: Mapping[str, Any]) -> Options:
    return Options(
        **sources,
        image_column=wanted.image_column,
        label_column=wanted.label_column,
        size=wanted.size,
        channels=wanted.channels,
        encoding=wanted.encoding,
        seed=wanted.seed,
    )


def _prepare(wanted: argparse.Namespace) -> int:
    dest = RunFolder(*open_filesystem(wanted.dest, wanted.dest_endpoint or wanted.endpoint))
    preparation = _preparation(wanted)
    was_finished = is_finished(dest, preparation.options)
    with Progress(preparation.unit) as progress:
        context = PrepareContext(
            endpoint=wanted.endpoint,
            threads=wanted.jobs or default_threads(wanted.source),
            processes=wanted.jobs,
            max_bad_samples=wanted.max_bad_samples,
            say=progress.say,
            show=progress,
        )
        preparation.write(dest, context)
    if was_finished:
        _say(f"{wanted.dest} was finished before")
    prepared = read_prepared(dest, path=wanted.dest, endpoint=wanted.dest_endpoint)
    files = [*prepared.train.files, *prepared.valid.files]
    size = sum(info.size for info in dest.infos(files))
    print(
        f"{prepared.num_train:,} training and {prepared.num_valid:,} validation {samples_text(prepared)}, "
        f"{size_text(size)} in {len(files)} files: {wanted.dest}"
    )
    if prepared.bad_samples:
        print(f"bad samples left out: {prepared.bad_samples}; dataset.json lists them")
    return 0


def samples_text(prepared: Prepared) -> str:
    """Return what the samples of a data set are, as the last line of `data prepare` says it."""
    info = prepared.info
    match info:
        case TokenInfo():
            learnt = info.train.learnt_tokens + info.valid.learnt_tokens
            return f"rows of {info.row_tokens:,} tokens, {learnt:,} tokens learnt"
        case TokenStreamInfo():
            return f"rows of {info.row_tokens:,} tokens"
        case _:
            shape = " x ".join(map(str, info.shape))
            return f"images of {shape}, {info.encoding}, {len(info.classes)} classes"


def _inspect(wanted: argparse.Namespace) -> int:
    folder, prepared = open_prepared(wanted.source, wanted.endpoint), None
    if folder is not None:
        prepared = read_prepared(folder, path=wanted.source, endpoint=wanted.endpoint)
        if isinstance(prepared.info, TokenInfo | TokenStreamInfo):
            return _inspect_tokens(wanted, prepared, prepared.info)
    elif wanted.table or tables.is_table(wanted.source, wanted.endpoint, wanted.image_column):
        return _inspect_table(wanted)
    from trainyard_trainer.tools.inspection import images  # it imports matplotlib

    if folder is not None and prepared is not None:
        facts = images.look_at_prepared(folder, prepared)
    else:
        facts = images.look_at_source(
            wanted.source,
            endpoint=wanted.endpoint,
            columns=ImageColumns(wanted.image_column, wanted.label_column),
            say=_say,
        )
    print(json.dumps(facts.known, indent=1) if wanted.json else images.describe(facts.known))
    if wanted.grid:
        images.write_grid(facts, wanted.grid)
        _say(f"drawn: {wanted.grid}")
    return 0


def _inspect_table(wanted: argparse.Namespace) -> int:
    if wanted.grid:
        raise ConfigError(
            f"--grid draws images, and {wanted.source} is shown as a table: leave it out"
        )
    table = tables.look_at_table(absolute(wanted.source), wanted.endpoint)
    print(json.dumps(table.to_json(), indent=1) if wanted.json else table.to_text())
    return 0


def _train_tokenizer(wanted: argparse.Namespace) -> int:
    num_bytes = train_tokenizer(
        absolute(wanted.source),
        Path(wanted.out).resolve(),
        vocab_size=wanted.vocab_size,
        pattern=wanted.text_files,
        endpoint=wanted.endpoint,
        say=_say,
    )
    print(f"{wanted.vocab_size:,} tokens of {num_bytes:,} bytes of text: {wanted.out}")
    return 0


def _inspect_tokens(
    wanted: argparse.Namespace, prepared: Prepared, info: TokenInfo | TokenStreamInfo
) -> int:
    if wanted.grid:
        raise ConfigError(f"--grid draws images, and {wanted.source} holds tokens: leave it out")
    if wanted.json:
        print(json.dumps(tokens.tokens_as_json(prepared, info), indent=1))
    elif isinstance(info, TokenStreamInfo):
        print(tokens.stream_as_text(prepared, info))
    else:
        has_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(tokens.tokens_as_text(prepared, info, has_colour=has_colour))
    return 0


COMMANDS = {
    DATA_PREPARE: _prepare,
    DATA_INSPECT: _inspect,
    DATA_TOKENIZER: _train_tokenizer,
}


class Progress:
    """A bar on a terminal, else a line on standard error now and then."""

    def __init__(self, unit: str) -> None:
        """`unit` is what is counted; empty if the stage says it."""
        self._unit = f" {unit}" if unit else ""
        self._bar: Bar | None = None
        self._stage = ""
        self._done = 0
        self._began = self._told = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self.__exit__()
            self._stage, self._done, self._bar = (
                stage,
                0,
                Bar(f"{stage}: {total:,}{self._unit}", total),
            )
            self._began = self._told = now
        if self._bar is not None:
            self._bar.advance(done - self._done)
        self._done = done
        if not sys.stderr.isatty() and now - self._told >= TELL_S:
            self._told = now
            rate = done / (now - self._began)
            _say(f"{stage}: {done:,} of {total:,}{self._unit}, {rate:,.0f}{self._unit}/s")

    def say(self, line: str) -> None:
        self.__exit__()
        _say(line)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run_with_safe_streams(main))
