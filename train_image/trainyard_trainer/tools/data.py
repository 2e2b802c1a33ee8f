"""Data sets by hand: `python -m trainyard_trainer.tools.data prepare SOURCE DEST` or `inspect SOURCE`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

from trainyard_trainer.data.preparation.plan import Options
from trainyard_trainer.data.preparation.prepare import Means, is_finished, prepare
from trainyard_trainer.data.preparation.run_data import absolute, default_threads
from trainyard_trainer.data.prepared import read_prepared
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.storage import open_filesystem
from trainyard_trainer.terminal import Bar, size_text
from trainyard_trainer.tools.command_line import Arguments, exit_code_of

TELL_S = 5.0
"""Between two lines of progress, where no terminal shows a bar."""


def main(arguments: list[str] | None = None) -> int:
    wanted = _parser().parse_args(arguments)
    return exit_code_of(lambda: wanted.run(wanted))


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
    was_finished = is_finished(dest, options)
    with Progress() as progress:
        means = Means(
            endpoint=wanted.endpoint,
            threads=wanted.jobs or default_threads(wanted.source),
            max_bad_samples=wanted.max_bad_samples,
            say=progress.say,
            show=progress,
        )
        prepare(options, dest, means)
    if was_finished:
        _say(f"{wanted.dest} was finished before")
    prepared = read_prepared(dest, path=wanted.dest, endpoint=wanted.dest_endpoint)
    files = [*prepared.train.files, *prepared.valid.files]
    size = sum(info.size for info in dest.filesystem.get_file_info(files))
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
    # matplotlib comes with it.
    from trainyard_trainer.tools.inspection import describe, look_at, write_grid

    facts = look_at(
        wanted.source,
        endpoint=wanted.endpoint,
        image_column=wanted.image_column,
        label_column=wanted.label_column,
        say=_say,
    )
    print(json.dumps(facts.known, indent=1) if wanted.json else describe(facts.known))
    if wanted.grid:
        write_grid(facts, wanted.grid)
        _say(f"drawn: {wanted.grid}")
    return 0


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


def _parser() -> argparse.ArgumentParser:
    parser = Arguments(prog="python -m trainyard_trainer.tools.data")
    commands = parser.add_subparsers(required=True, metavar="prepare | inspect")
    prepare_parser = commands.add_parser(
        "prepare", help="convert a data set to Parquet that trains fast"
    )
    _add_source(prepare_parser)
    add = prepare_parser.add_argument
    add("dest", metavar="DEST", help="folder or s3://bucket/prefix to write")
    add("--valid", metavar="SOURCE", help="validation images; without them, a share of SOURCE")
    add(
        "--valid-share",
        type=_number(float, lambda share: 0 < share < 1, "a number between 0 and 1"),
        default=0.2,
        metavar="SHARE",
        help="share of each class for validation, where SOURCE has no part for it (0.2)",
    )
    positive = _number(int, lambda count: count > 0, "a whole number from 1")
    add("--size", type=positive, metavar="PIXELS", help="bring all images to this height and width")
    add("--channels", type=int, choices=(1, 3), help="1 for grey, 3 for colour; as in the source")
    add("--encoding", choices=("auto", "raw", "encoded"), default="auto", help="pixels or pictures")
    count = _number(int, lambda count: count >= 0, "a whole number from 0")
    add("--max-bad-samples", type=count, default=0, metavar="N", help="leave out up to so many (0)")
    add("--seed", type=count, default=0, metavar="N", help="of the split and of the order (0)")
    add("--dest-endpoint", metavar="URL", help="the same for DEST, if it is another one")
    add("--jobs", type=positive, metavar="N", help="threads that read and decode; one per CPU")
    prepare_parser.set_defaults(run=_prepare)

    inspect_parser = commands.add_parser(
        "inspect", help="counts, classes, shapes and bytes of a data set"
    )
    _add_source(inspect_parser)
    add = inspect_parser.add_argument
    add("--grid", metavar="FILE.png", help="draw a few images of each class, too")
    add("--json", action="store_true", help="print JSON")
    inspect_parser.set_defaults(run=_inspect)
    return parser


def _add_source(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="SOURCE", help="digits, a path, or s3://bucket/prefix")
    add("--endpoint", metavar="URL", help="address of an S3 server that is not AWS")
    add("--image-column", default="image", metavar="NAME", help="of a manifest or Parquet (image)")
    add("--label-column", default="label", metavar="NAME", help="of a manifest or Parquet (label)")


def _number(
    kind: Callable[[str], float], is_right: Callable[[float], bool], rule: str
) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not is_right(value):
            raise argparse.ArgumentTypeError(f"{text} is not {rule}")
        return value

    return read


if __name__ == "__main__":
    sys.exit(main())
