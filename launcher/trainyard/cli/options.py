"""The options that several commands take, and what they say: a run, its name, a platform."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from trainyard.run import NAMESPACE as NAMESPACE
from trainyard.run import check_namespace

if TYPE_CHECKING:
    from trainyard.planning.objects import RunObjects
    from trainyard.platform import Platform
    from trainyard.run_file.models import RunConfig


def _check_namespace(namespace: str) -> str:
    return check_namespace(namespace, "--namespace")


RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.")]
RunName = Annotated[str, typer.Argument(metavar="NAME", help="The run's name, or its run file.")]
Settings = Annotated[
    Optional[list[str]],  # typer reads this at run time, on Python 3.10 too
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the run file: a.b=c."),
]
Gpus = Annotated[
    Optional[str],
    typer.Option(metavar="N", help="GPUs, instead of the file's; 8:16 is a range."),
]
Workers = Annotated[
    Optional[str], typer.Option(metavar="N", help="CPU workers, instead of the file's resources.")
]
Name = Annotated[Optional[str], typer.Option(metavar="NAME", help="Name, instead of the file's.")]
PlatformFile = Annotated[
    Optional[Path],
    typer.Option("--platform", metavar="FILE", help="A platform file (`trainyard platform get`)."),
]
FromCluster = Annotated[
    bool, typer.Option("--from-cluster", help="Use the platform of the namespace's ConfigMap.")
]
Namespace = Annotated[
    str,
    typer.Option(
        "--namespace",
        "-n",
        metavar="NAMESPACE",
        help="Kubernetes namespace.",
        callback=_check_namespace,
    ),
]
AllNamespaces = Annotated[bool, typer.Option("--all-namespaces", "-A", help="Of all namespaces.")]
Fresh = Annotated[
    bool,
    typer.Option("--fresh", help="Begin anew: what the run's folder holds is set aside first."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def load_run(
    path: Path,
    settings: list[str] | None,
    gpus: str | None,
    workers: str | None,
    name: str | None,
) -> RunConfig:
    from trainyard.run_file import load

    return load.load_run(path, settings or (), gpus=gpus, workers=workers, name=name)


def run_name(name: str) -> str:
    """A run's name, given as itself or as the run file that holds it."""
    from trainyard.run_file.load import load_name
    from trainyard.run_file.validation import check_name

    if name.endswith((".yaml", ".yml")):
        return load_name(Path(name))
    return check_name(name, "NAME")


def platform_of(
    path: Path | None, from_cluster: bool, namespace: str, cluster: Any = None
) -> Platform:
    """The platform asked for; says on standard error which one it is."""
    from trainyard.api import CLUSTER, find_platform
    from trainyard.errors import ConfigError
    from trainyard.platform import CONFIG_MAP

    if path is not None and from_cluster:
        raise ConfigError("--platform and --from-cluster exclude each other")
    packaged = "packaged (the chart at its default values)"
    which = f"ConfigMap {namespace}/{CONFIG_MAP}" if from_cluster else path or packaged
    typer.echo(f"platform: {which}", err=True)
    return find_platform(CLUSTER if from_cluster else path, namespace, cluster)


def objects_with_warnings(run: RunConfig, platform: Platform, namespace: str) -> RunObjects:
    """Plan and render a run, and print the warnings about its RayJob on standard error."""
    from trainyard.planning.objects import run_objects

    objects = run_objects(run, platform, namespace)
    print_warnings(objects.warnings)
    return objects


def print_warnings(messages: Iterable[str]) -> None:
    """Print warnings on standard error, one for each line."""
    for message in messages:
        typer.echo(f"warning: {message}", err=True)


def yaml_text(document: Any) -> str:
    import yaml

    # One line per value: a long config is not folded, and a diff shows whole values.
    return yaml.dump(
        document, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False, width=10**9
    )


def print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2))
