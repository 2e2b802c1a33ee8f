"""The commands `init` and `schema`: write a new run file, and print the JSON Schemas of the files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, TypeVar

import typer

from trainyard.cli.options import (
    NAMESPACE,
    Context,
    FromCluster,
    Gpus,
    Namespace,
    PlatformFile,
    Workers,
    local_path,
    platform_of,
)

if TYPE_CHECKING:
    from trainyard.platform import Platform

T = TypeVar("T", str, int)


def schema(
    kind: Annotated[Literal["run", "platform"], typer.Argument(help="The kind of file.")],
) -> None:
    """Print the JSON Schema of run files or platform files, with which editors check them."""
    import json

    from trainyard.planning.authoring.schema import schema_of

    typer.echo(json.dumps(schema_of(kind), indent=2))


def init(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="[FILE]",
            parser=local_path,
            help="The file to write; an existing file is not overwritten.",
        ),
    ] = Path("run.yaml"),
    name: Annotated[
        Optional[str], typer.Option(metavar="NAME", help="The name of the run.")
    ] = None,
    source: Annotated[
        Optional[str],
        typer.Option(
            metavar="SOURCE", help="The data set: `digits`, a path, or s3://bucket/prefix."
        ),
    ] = None,
    classes: Annotated[
        Optional[int], typer.Option(metavar="N", help="Number of classes in the data.")
    ] = None,
    channels: Annotated[
        Optional[int], typer.Option(metavar="N", help="1 for grey images, 3 for colour images.")
    ] = None,
    model: Annotated[
        Optional[str],
        typer.Option(metavar="NAME", help="A torchvision model, such as resnet18 or resnet50."),
    ] = None,
    recipe: Annotated[
        Optional[str],
        typer.Option(
            metavar="MODULE",
            help="Write a run with a recipe of your own, with its code and a test, in code/MODULE.py.",
        ),
    ] = None,
    gpus: Gpus = None,
    workers: Workers = None,
    epochs: Annotated[
        Optional[int], typer.Option(metavar="N", help="How many times each sample is used.")
    ] = None,
    batch_size: Annotated[
        Optional[int],
        typer.Option(metavar="N", help="Samples of one optimizer step over all workers."),
    ] = None,
    platform_file: PlatformFile = None,
    from_cluster: FromCluster = False,
    namespace: Namespace = NAMESPACE,
    context: Context = None,
) -> None:
    """Write a run file that explains every key; on a terminal, ask for what the options do not give."""
    from trainyard.errors import ConfigError

    if recipe is not None:
        others = (source, classes, channels, model, gpus, workers, epochs, batch_size)
        _init_recipe(file, name, recipe, is_alone=others == (None,) * len(others))
        return
    if gpus is not None and workers is not None:
        raise ConfigError("--gpus and --workers exclude each other: one worker starts per GPU")
    if file.exists():
        raise ConfigError(
            f"{file} exists already and is not overwritten", "Name another file, or remove it."
        )
    platform = platform_of(platform_file, from_cluster, namespace, context=context)
    name = _ask("The run's name", name, file.stem)
    data, network = _ask_for_data_and_network(source, classes, channels, model)
    resources = _ask_for_resources(gpus, workers)
    train = {"model": network, "epochs": _ask("Epochs", epochs, 10)}
    if batch_size is not None:
        train["global_batch_size"] = batch_size
    _write(file, {"name": name, "resources": resources, "data": data, "train": train}, platform)


def _write(file: Path, answers: dict[str, Any], platform: Platform) -> None:
    """Write a run file with the answers, and defaults for what was not asked."""
    from trainyard.cli import show
    from trainyard.planning.authoring.init import check_text, default_batch, run_text, write_run

    ((unit, amount),) = answers["resources"].items()
    answers["train"].setdefault("global_batch_size", default_batch(amount, unit, platform))
    text = run_text({**answers, "checkpoint": {"keep": 2}, "faults": {"retries": 2}})
    check_text(text, str(file), platform)
    write_run(file, text)
    show.say(f"{file} is written; `trainyard plan {file}` shows what it needs")


def _ask_for_data_and_network(
    source: str | None, classes: int | None, channels: int | None, model: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sections `data` and `train.model` of a run file: as given, else ask."""
    source = _ask("Data: digits, a path, or s3://bucket/prefix", source, "digits")
    classes, channels = _ask_for_sizes(source, classes, channels)
    name = _ask("Model of torchvision", model, "resnet18")
    return {"source": source}, {"name": name, "in_channels": channels, "num_classes": classes}


def _ask_for_resources(gpus: str | None, workers: str | None) -> dict[str, Any]:
    """Return the section `resources` of a run file: as given, else ask. Two workers stand for no GPU."""
    from trainyard.run_file.overrides import parse_amount

    if gpus is None and workers is None:
        gpus = _ask("GPUs (a number, 8:16 for a range, 0 for none)", None, "0")
        gpus, workers = (None, "2") if gpus == "0" else (gpus, None)
    return {"workers" if gpus is None else "gpus": parse_amount(gpus or workers or "")}


def _ask_for_sizes(source: str, classes: int | None, channels: int | None) -> tuple[int, int]:
    """Return the numbers of classes and channels: as given, else those of a built-in source, else ask.

    Raises ConfigError if they are not known and there is no terminal.
    """
    from trainyard.errors import ConfigError
    from trainyard_trainer.config.data.sources import BUILT_IN

    built_in = BUILT_IN.get(source)
    known_classes = built_in.num_classes if built_in else None
    known_channels = built_in.num_channels if built_in else None
    if known_classes is None and None in (classes, channels) and not sys.stdin.isatty():
        raise ConfigError(
            f"the numbers of classes and channels of {source} are not known",
            "Use --classes N and --channels N; `trainyard data inspect` shows them.",
        )
    return (
        _ask("Classes", classes, known_classes or 10, is_known=known_classes is not None),
        _ask(
            "Channels of an image",
            channels,
            known_channels or 3,
            is_known=known_channels is not None,
        ),
    )


def _init_recipe(file: Path, name: str | None, recipe: str, *, is_alone: bool) -> None:
    """Write the skeleton of a recipe. `is_alone` is false if options for built-in recipes are given."""
    from trainyard.cli import show
    from trainyard.errors import ConfigError
    from trainyard.planning.authoring.new_recipe import files_of, write_files

    if not is_alone:
        raise ConfigError(
            "--recipe takes no option beside --name: change the run file after it is written"
        )
    files = files_of(file, name, recipe)
    write_files(files)
    show.say(
        f"{', '.join(map(str, files))} are written; `trainyard train {file}` trains the recipe"
    )


def _ask(question: str, given: T | None, default: T, *, is_known: bool = False) -> T:
    """Return the given value, else what is typed on a terminal, else the default."""
    if given is not None:
        return given
    if is_known or not sys.stdin.isatty():
        return default
    answer: T = typer.prompt(question, default=default, type=type(default), err=True)
    return answer
