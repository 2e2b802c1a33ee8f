"""Commands about the files that people write: a new run file, and the schemas that editors check by."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, TypeVar

import typer

from trainyard.cli.options import (
    NAMESPACE,
    FromCluster,
    Gpus,
    Namespace,
    PlatformFile,
    Workers,
    platform_of,
)

T = TypeVar("T", str, int)


def schema(
    kind: Annotated[Literal["run", "platform"], typer.Argument(help="Which kind of file.")],
) -> None:
    """Print the JSON Schema of run files or of platform files, for editors and other programs."""
    import json

    from trainyard.planning.schema import schema_of

    typer.echo(json.dumps(schema_of(kind), indent=2))


def init(
    file: Annotated[
        Path, typer.Argument(metavar="[FILE]", help="Where to; what exists is not overwritten.")
    ] = Path("run.yaml"),
    name: Annotated[Optional[str], typer.Option(metavar="NAME", help="The run's name.")] = None,
    source: Annotated[
        Optional[str],
        typer.Option(metavar="SOURCE", help="The data: `digits`, a path, or s3://bucket/prefix."),
    ] = None,
    classes: Annotated[
        Optional[int], typer.Option(metavar="N", help="How many classes the data has.")
    ] = None,
    channels: Annotated[
        Optional[int], typer.Option(metavar="N", help="1 for grey images, 3 for colour.")
    ] = None,
    model: Annotated[
        Optional[str],
        typer.Option(metavar="NAME", help="A torchvision model, such as resnet18 or resnet50."),
    ] = None,
    gpus: Gpus = None,
    workers: Workers = None,
    epochs: Annotated[
        Optional[int], typer.Option(metavar="N", help="How often each sample is seen.")
    ] = None,
    batch_size: Annotated[
        Optional[int], typer.Option(metavar="N", help="Samples per step over all workers.")
    ] = None,
    platform_file: PlatformFile = None,
    from_cluster: FromCluster = False,
    namespace: Namespace = NAMESPACE,
) -> None:
    """Write a run file in which every key is explained; on a terminal it asks for what is not given."""
    from trainyard.cli import show
    from trainyard.errors import ConfigError
    from trainyard.planning.init import (
        check_text,
        default_batch,
        run_text,
        write_run,
    )
    from trainyard.run_file.overrides import parse_amount
    from trainyard_trainer.config.data_sources import BUILT_IN

    if gpus is not None and workers is not None:
        raise ConfigError("--gpus and --workers exclude each other: one worker starts per GPU")
    if file.exists():
        raise ConfigError(
            f"{file} exists already and is not overwritten", "Name another file, or remove it."
        )
    platform = platform_of(platform_file, from_cluster, namespace)
    name = _ask("The run's name", name, file.stem)
    source = _ask("Data: digits, a path, or s3://bucket/prefix", source, "digits")
    built_in = BUILT_IN.get(source)
    known_classes = built_in.num_classes if built_in else None
    known_channels = built_in.num_channels if built_in else None
    if known_classes is None and None in (classes, channels) and not sys.stdin.isatty():
        raise ConfigError(
            f"how many classes and channels {source} has must be said",
            "Use --classes N and --channels N; `trainyard data inspect` shows them.",
        )
    classes = _ask("Classes", classes, known_classes or 10, is_known=known_classes is not None)
    channels = _ask(
        "Channels of an image", channels, known_channels or 3, is_known=known_channels is not None
    )
    model = _ask("Model of torchvision", model, "resnet18")
    if gpus is None and workers is None:
        gpus = _ask("GPUs (a number, 8:16 for a range, 0 for none)", None, "0")
        gpus, workers = (None, "2") if gpus == "0" else (gpus, None)
    epochs = _ask("Epochs", epochs, 10)
    unit: Literal["gpus", "workers"] = "workers" if gpus is None else "gpus"
    amount = parse_amount(gpus or workers or "")
    if batch_size is None:
        batch_size = default_batch(amount, unit, platform)
    answers: dict[str, Any] = {
        "name": name,
        "resources": {unit: amount},
        "data": {"source": source},
        "train": {
            "model": {"name": model, "in_channels": channels, "num_classes": classes},
            "epochs": epochs,
            "global_batch_size": batch_size,
        },
        "checkpoint": {"keep": 2},
        "faults": {"retries": 2},
    }
    text = run_text(answers)
    check_text(text, str(file), platform)
    write_run(file, text)
    show.say(f"{file} is written: `trainyard plan {file}` says what it takes")


def _ask(question: str, given: T | None, default: T, *, is_known: bool = False) -> T:
    """What was given, else the answer of a terminal, else the default."""
    if given is not None:
        return given
    if is_known or not sys.stdin.isatty():
        return default
    answer: T = typer.prompt(question, default=default, type=type(default), err=True)
    return answer
