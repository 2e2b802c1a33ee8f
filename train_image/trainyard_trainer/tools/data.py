"""Data sets and tokenizers by hand: `prepare SOURCE DEST`, `inspect SOURCE`, or `tokenizer SOURCE`.

python -m trainyard_trainer.tools.data prepare|inspect|tokenizer ARGUMENT...
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from trainyard_trainer.config.data_sources import absolute
from trainyard_trainer.config.tool_arguments import DATA_INSPECT, DATA_PREPARE, DATA_TOKENIZER
from trainyard_trainer.data.preparation.context import PrepareContext
from trainyard_trainer.data.preparation.destination import is_finished
from trainyard_trainer.data.preparation.plan import Options
from trainyard_trainer.data.preparation.prepare import prepare
from trainyard_trainer.data.preparation.run_data import default_threads
from trainyard_trainer.data.preparation.tokens.train_tokenizer import train_tokenizer
from trainyard_trainer.data.prepared import Prepared, TokenInfo, TokenStreamInfo, read_prepared
from trainyard_trainer.data.sources.images.find import open_prepared
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_files.sizes import size_text
from trainyard_trainer.run_files.standard_streams import run_with_safe_streams
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


def _prepare(wanted: argparse.Namespace) -> int:
    dest = RunFolder(*open_filesystem(wanted.dest, wanted.dest_endpoint or wanted.endpoint))
    options = Options(
        source=absolute(wanted.source),
        valid_source=absolute(wanted.valid) if wanted.valid else None,
        valid_share=wanted.valid_share,
        image_column=wanted.image_column,
        label_column=wanted.label_column,
        size=wanted.size,
        channels=wanted.channels,
        encoding=wanted.encoding,
        seed=wanted.seed,
    )
    was_finished = is_finished(dest, asdict(options))
    with Progress() as progress:
        context = PrepareContext(
            endpoint=wanted.endpoint,
            threads=wanted.jobs or default_threads(wanted.source),
            max_bad_samples=wanted.max_bad_samples,
            say=progress.say,
            show=progress,
        )
        prepare(options, dest, context)
    if was_finished:
        _say(f"{wanted.dest} was finished before")
    prepared = read_prepared(dest, path=wanted.dest, endpoint=wanted.dest_endpoint)
    files = [*prepared.train.files, *prepared.valid.files]
    size = sum(info.size for info in dest.infos(files))
    shape = " x ".join(map(str, prepared.images.shape))
    print(
        f"{prepared.num_train:,} training and {prepared.num_valid:,} validation images of {shape}, "
        f"{prepared.images.encoding}, {len(prepared.images.classes)} classes, "
        f"{size_text(size)} in {len(files)} files: {wanted.dest}"
    )
    if prepared.bad_samples:
        print(f"bad samples left out: {prepared.bad_samples}; dataset.json lists them")
    return 0


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
            image_column=wanted.image_column,
            label_column=wanted.label_column,
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

    def __init__(self) -> None:
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
            self._stage, self._done, self._bar = stage, 0, Bar(f"{stage}: {total:,} images", total)
            self._began = self._told = now
        if self._bar is not None:
            self._bar.advance(done - self._done)
        self._done = done
        if not sys.stderr.isatty() and now - self._told >= TELL_S:
            self._told = now
            rate = done / (now - self._began)
            _say(f"{stage}: {done:,} of {total:,} images, {rate:,.0f} images/s")

    def say(self, line: str) -> None:
        self.__exit__()
        _say(line)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run_with_safe_streams(main))
