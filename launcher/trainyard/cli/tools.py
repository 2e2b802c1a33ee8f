"""Commands about data, checkpoints and models: programs of the trainer, on a run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, NoReturn, Optional

import typer

from trainyard.cli.options import Json, run_name
from trainyard_trainer.config.data_sources import describe_preparable_sources

AnyRun = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's name, its run file, or its folder's path.")
]
Storage = Annotated[
    str,
    typer.Option(metavar="DIR", help="Where the folders of runs lie; s3://bucket/prefix, too."),
]
Endpoint = Annotated[
    Optional[str],
    typer.Option(metavar="URL", help="Address of an S3 server that is not AWS."),
]
OneCheckpoint = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Which weights: `delivered` (the run's model.pt), `last`, `best`, or a checkpoint's name.",
    ),
]
ImageColumn = Annotated[
    Optional[str],
    typer.Option(
        metavar="NAME",
        help="Column of the images: paths in a manifest, bytes or pixels in Parquet.  [default: image]",
    ),
]
LabelColumn = Annotated[
    Optional[str],
    typer.Option(
        metavar="NAME", help="Column of the labels: numbers from 0, or names.  [default: label]"
    ),
]

RUNS = "runs"


def checkpoints_ls(
    run: AnyRun, storage: Storage = RUNS, endpoint: Endpoint = None, as_json: Json = False
) -> None:
    """List the checkpoints of a run, newest first, by what their manifests say."""
    _tool("checkpoints", ["ls"], [any_run(run)], storage=storage, endpoint=endpoint, json=as_json)


def checkpoints_verify(
    run: AnyRun, storage: Storage = RUNS, endpoint: Endpoint = None, as_json: Json = False
) -> None:
    """Read all checkpoints of a run and compare their SHA-256; exit code 1 if one is damaged."""
    _tool(
        "checkpoints", ["verify"], [any_run(run)], storage=storage, endpoint=endpoint, json=as_json
    )


def checkpoints_prune(
    run: AnyRun,
    keep: Annotated[
        int, typer.Option(metavar="N", min=1, help="How many of the newest intact ones stay.")
    ],
    keep_best: Annotated[
        bool, typer.Option("--keep-best", help="The best one by validation stays, too.")
    ] = False,
    keep_every_epochs: Annotated[
        Optional[int],
        typer.Option(
            metavar="K", min=1, help="One for each K epochs stays, too, as in a run file."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be deleted.")
    ] = False,
    storage: Storage = RUNS,
    endpoint: Endpoint = None,
) -> None:
    """Delete older and damaged checkpoints of a run that is not being trained."""
    _tool(
        "checkpoints",
        ["prune"],
        [any_run(run)],
        storage=storage,
        endpoint=endpoint,
        keep=keep,
        keep_best=keep_best,
        keep_every_epochs=keep_every_epochs,
        dry_run=dry_run,
    )


def checkpoints_export(
    run: AnyRun,
    out: Annotated[
        Optional[str],
        typer.Option(
            metavar="FILE", help="Where to; s3:// too.  [default: a file in <run's folder>/export]"
        ),
    ] = None,
    format: Annotated[  # noqa: A002 - the option's name
        Literal["state_dict", "torchscript", "pt2", "onnx"],
        typer.Option(
            help="`state_dict` for torch.load, `torchscript` for torch.jit.load, `pt2` for "
            "torch.export.load, `onnx` for other programs.",
        ),
    ] = "state_dict",
    checkpoint: OneCheckpoint = "delivered",
    storage: Storage = RUNS,
    endpoint: Endpoint = None,
) -> None:
    """Write a model out, and beside it, as FILE.json, its classes and how images are prepared."""
    _tool(
        "export",
        [],
        [any_run(run)],
        storage=storage,
        endpoint=endpoint,
        out=out,
        format=format,
        checkpoint=checkpoint,
    )


def predict(
    run: AnyRun,
    images: Annotated[
        Optional[list[str]],
        typer.Argument(metavar="[IMAGE...]", help="Picture files, such as PNG or JPEG."),
    ] = None,
    prompt: Annotated[
        Optional[str], typer.Option(metavar="TEXT", help="Text that a language model continues.")
    ] = None,
    length: Annotated[
        Optional[int],
        typer.Option(metavar="N", min=1, help="Bytes of a continuation, at most.  [default: 200]"),
    ] = None,
    temperature: Annotated[
        Optional[float],
        typer.Option(
            metavar="T", min=0, help="0 takes the likeliest byte each time.  [default: 0.8]"
        ),
    ] = None,
    seed: Annotated[
        Optional[int],
        typer.Option(metavar="N", min=0, help="Another seed, another text.  [default: 0]"),
    ] = None,
    data: Annotated[
        Optional[str],
        typer.Option(
            metavar="PATH",
            help="Label all rows of Parquet files, as `data prepare` writes them or with a column of "
            "images; s3://bucket/prefix, too.",
        ),
    ] = None,
    out: Annotated[
        Optional[str],
        typer.Option(metavar="PATH", help="Where the predictions of --data go; s3://, too."),
    ] = None,
    image_column: Annotated[
        Optional[str],
        typer.Option(metavar="NAME", help="Column of the images of --data.  [default: image]"),
    ] = None,
    label_column: Annotated[
        Optional[str],
        typer.Option(
            metavar="NAME",
            help="Column of --data to compare with, where it is there.  [default: label]",
        ),
    ] = None,
    top: Annotated[
        int,
        typer.Option(metavar="K", min=1, help="How many labels per image, the likeliest first."),
    ] = 1,
    grid: Annotated[
        Optional[Path],
        typer.Option(metavar="FILE.png", help="Draw the images with their labels, too."),
    ] = None,
    checkpoint: OneCheckpoint = "delivered",
    batch_size: Annotated[
        Optional[int], typer.Option(metavar="N", min=1, help="Images at once.  [default: 64]")
    ] = None,
    storage: Storage = RUNS,
    endpoint: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Print the labels that a run's model gives to images, and how sure it is; or continue a text."""
    from trainyard.errors import ConfigError

    if data is not None or out is not None:
        texts = {
            "--prompt": prompt,
            "--length": length,
            "--temperature": temperature,
            "--seed": seed,
        }
        others = {"IMAGE": images or None, "--grid": grid, **texts}
        if given := [name for name, value in others.items() if value is not None]:
            raise ConfigError(f"--data and {given[0]} exclude each other: leave one out")
        if data is None or out is None:
            raise ConfigError(
                "--data PATH and --out PATH belong together: what is read, and written"
            )
        _predict_data(
            any_run(run),
            storage=storage,
            endpoint=endpoint,
            data=data,
            out=out,
            image_column=image_column,
            label_column=label_column,
            checkpoint=checkpoint,
            top=top,
            batch_size=batch_size,
            json=as_json,
        )
    if image_column is not None or label_column is not None:
        raise ConfigError("--image-column and --label-column are of --data PATH")
    if not images and prompt is None:
        raise ConfigError(
            "predict has nothing to look at",
            "Name images, or a data set with --data PATH --out PATH, or give a language model its "
            "--prompt TEXT.",
        )
    _tool(
        "predict",
        [],
        [any_run(run), *(images or [])],
        storage=storage,
        endpoint=endpoint,
        checkpoint=checkpoint,
        prompt=prompt,
        length=length,
        temperature=temperature,
        seed=seed,
        top=top,
        grid=grid,
        batch_size=batch_size,
        json=as_json,
    )


def _predict_data(run: str, **options: object) -> NoReturn:
    """Label a data set with Ray Data, on a Ray of this machine."""
    from trainyard.local.tools import require_packages

    require_packages(["ray", "obstore"], "`predict --data`")
    _tool("predict_data", [], [run], **options)


def data_prepare(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help=describe_preparable_sources(),
        ),
    ],
    dest: Annotated[
        str, typer.Argument(metavar="DEST", help="The folder or s3://bucket/prefix to write.")
    ],
    valid: Annotated[
        Optional[str],
        typer.Option(metavar="SOURCE", help="Validation images; without them, a share of SOURCE."),
    ] = None,
    valid_share: Annotated[
        Optional[float],
        typer.Option(
            metavar="SHARE",
            help="Share of each class for validation, where SOURCE has no part for it.  [default: 0.2]",
        ),
    ] = None,
    size: Annotated[
        Optional[int],
        typer.Option(
            metavar="PIXELS",
            min=1,
            help="Height and width of all images: the middle of each, resized.  [default: the "
            "source's, where all are alike]",
        ),
    ] = None,
    channels: Annotated[
        Optional[Literal["1", "3"]],
        typer.Option(help="1 for grey, 3 for colour.  [default: as in the source]"),
    ] = None,
    encoding: Annotated[
        Literal["auto", "raw", "encoded"],
        typer.Option(
            help="Keep pixels, which train fastest, or picture files, which are smaller and decoded "
            "in training; `auto` takes what suits their size."
        ),
    ] = "auto",
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    max_bad_samples: Annotated[
        Optional[int],
        typer.Option(
            metavar="N", min=0, help="How many that cannot be read may be left out.  [default: 0]"
        ),
    ] = None,
    seed: Annotated[
        Optional[int],
        typer.Option(metavar="N", min=0, help="Seed of the split and of the order.  [default: 0]"),
    ] = None,
    endpoint: Endpoint = None,
    dest_endpoint: Annotated[
        Optional[str],
        typer.Option(metavar="URL", help="The same for DEST, if it is another one."),
    ] = None,
    jobs: Annotated[
        Optional[int],
        typer.Option(
            metavar="N", min=1, help="Threads that read and decode.  [default: one per CPU]"
        ),
    ] = None,
) -> None:
    """Convert images to Parquet that trains fast: shuffled, split, checked; the same command resumes."""
    _tool(
        "data",
        ["prepare"],
        [source, dest],
        valid=valid,
        valid_share=valid_share,
        size=size,
        channels=channels,
        encoding=encoding,
        image_column=image_column,
        label_column=label_column,
        max_bad_samples=max_bad_samples,
        seed=seed,
        endpoint=endpoint,
        dest_endpoint=dest_endpoint,
        jobs=jobs,
    )


def data_inspect(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="Whatever `prepare` takes, or what it has written."),
    ],
    grid: Annotated[
        Optional[Path],
        typer.Option(metavar="FILE.png", help="Draw a few images with their labels, too."),
    ] = None,
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    endpoint: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Show counts, classes, shapes and bytes of a data set."""
    _tool(
        "data",
        ["inspect"],
        [source],
        grid=grid,
        image_column=image_column,
        label_column=label_column,
        endpoint=endpoint,
        json=as_json,
    )


def _tool(module: str, command: list[str], words: list[str], **options: object) -> NoReturn:
    """Run a tool of the trainer on words and on the options that were given; end with its exit code."""
    from trainyard.local.tools import run_tool

    given = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            given.append(flag)
        elif value is not None and value is not False:
            given.append(f"{flag}={value}")
    raise typer.Exit(run_tool(module, [*command, *given, "--", *words]))


def any_run(run: str) -> str:
    """A run's name, as itself or as the run file that holds it; or the path of its folder."""
    return run if "/" in run and not run.endswith((".yaml", ".yml")) else run_name(run)
