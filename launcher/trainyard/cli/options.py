"""Options that several commands take, and functions that turn them into runs and platforms."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from trainyard.run import NAMESPACE as NAMESPACE
from trainyard.run import check_namespace, local_storage
from trainyard_trainer.config.location import local_problem
from trainyard_trainer.config.tools.shared_arguments import STORAGE

if TYPE_CHECKING:
    from trainyard.cluster.cluster import Cluster
    from trainyard.planning.objects import RunObjects
    from trainyard.platform import Platform
    from trainyard.run_file.models import RunConfig
    from trainyard.submission.run_folder.remote_folder import RemoteFolder


def check_namespace_option(namespace: str) -> str:
    """Return the value of --namespace if it can be one. Raises ConfigError."""
    return check_namespace(namespace, "--namespace")


def local_storage_option(storage: str | Path) -> Path:
    """Return the folder that --storage names, unresolved. Raises ConfigError for a URL."""
    local_storage(storage)
    return Path(storage)


RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.")]
RunName = Annotated[
    str, typer.Argument(metavar="NAME", help="The name of the run, or its run file.")
]
Settings = Annotated[
    Optional[list[str]],  # typer reads this at run time, on Python 3.10 too
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a key of the run file, such as train.epochs=3. Repeat it for more keys.",
    ),
]
Gpus = Annotated[
    Optional[str],
    typer.Option(
        metavar="N",
        help="Number of GPUs, instead of the run file's; 8:16 is a range for an elastic run.",
    ),
]
Workers = Annotated[
    Optional[str],
    typer.Option(metavar="N", help="Number of CPU workers, instead of the run file's resources."),
]
Name = Annotated[
    Optional[str], typer.Option(metavar="NAME", help="Name of the run, instead of the run file's.")
]
Warm = Annotated[
    bool,
    typer.Option(
        "--warm",
        help="Use the platform's standing RayCluster: no pods have to start for the run.",
    ),
]
PlatformFile = Annotated[
    Optional[Path],
    typer.Option(
        "--platform",
        metavar="FILE",
        help="Take the platform from a file that `trainyard platform get` has written.",
    ),
]
FromCluster = Annotated[
    bool, typer.Option("--from-cluster", help="Take the platform from the namespace's ConfigMap.")
]
Namespace = Annotated[
    str,
    typer.Option(
        "--namespace",
        "-n",
        metavar="NAMESPACE",
        help="The Kubernetes namespace.",
        callback=check_namespace_option,
    ),
]
Context = Annotated[
    Optional[str],
    typer.Option(
        "--context",
        metavar="CONTEXT",
        help="The kubeconfig context that names the cluster.  [default: the current context]",
    ),
]
AllNamespaces = Annotated[bool, typer.Option("--all-namespaces", "-A", help="Show all namespaces.")]
Fresh = Annotated[
    bool,
    typer.Option(
        "--fresh",
        help="Start from the beginning: the run's folder is renamed first, and nothing is lost.",
    ),
]
LocalStorage = Annotated[
    Path,
    typer.Option(
        "--storage",
        metavar="DIR",
        help="The folder for the folders of runs, on this machine.",
        parser=local_storage_option,
    ),
]
RUNS = Path(STORAGE.default)
"""Where `train` and its like keep the folders of runs if nothing else is said."""
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def local_path(path: str | Path) -> Path:
    """Return the path of a file of this machine. Raises ConfigError for a URL."""
    from trainyard.errors import ConfigError

    if (problem := local_problem(str(path))) is not None:
        raise ConfigError(f"{path}: {problem}")
    return Path(path)


def load_run_with_options(
    path: Path,
    settings: list[str] | None,
    gpus: str | None,
    workers: str | None,
    name: str | None,
    warm: bool = False,
) -> RunConfig:
    """Load a run file with the options that change it. Raises ConfigError."""
    from trainyard.run_file import load

    return load.load_run(path, settings or (), gpus=gpus, workers=workers, name=name, warm=warm)


def run_name(name: str) -> str:
    """Return a run's name, given as itself or as the path of its run file. Raises ConfigError."""
    from trainyard.run_file.load import load_name
    from trainyard.run_file.validation import check_name

    if name.endswith((".yaml", ".yml")):
        return load_name(Path(name))
    return check_name(name, "NAME")


def open_cluster(namespace: str, context: str | None) -> Cluster:
    """Return the cluster that the options choose, for a command that creates and deletes nothing."""
    from trainyard.cluster.cluster import Cluster

    return Cluster(namespace, context=context)


def open_cluster_to_change(namespace: str, context: str | None) -> Cluster:
    """Return the cluster that the options choose, and print its name on standard error.

    For each command that creates or deletes something, if only a pod that reads a run's folder.
    """
    cluster = open_cluster(namespace, context)
    typer.echo(f"cluster: {cluster}", err=True)
    return cluster


def platform_of(
    path: Path | None,
    from_cluster: bool,
    namespace: str,
    cluster: Any = None,
    context: str | None = None,
) -> Platform:
    """Return the platform that the options ask for, and print on standard error which one it is."""
    from trainyard.api import CLUSTER, find_platform
    from trainyard.errors import ConfigError
    from trainyard.platform import CONFIG_MAP

    if path is not None and from_cluster:
        raise ConfigError("--platform and --from-cluster exclude each other")
    packaged = "packaged (the chart at its default values)"
    which = f"ConfigMap {namespace}/{CONFIG_MAP}" if from_cluster else path or packaged
    typer.echo(f"platform: {which}", err=True)
    return find_platform(CLUSTER if from_cluster else path, namespace, cluster, context)


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


def open_run_folder(
    cluster: Cluster, name: str, head: str | None = None
) -> AbstractContextManager[RemoteFolder]:
    """Open a run's folder on a cluster, through its head pod if there is one.

    It prints on standard error which platform tells where the folder is.
    """
    from trainyard.submission.run_folder.reader_pod import open_folder

    platform = platform_of(None, True, cluster.namespace, cluster)
    return open_folder(cluster, platform, name, head)


def yaml_text(document: Any) -> str:
    """Return a document as YAML, each value on one line."""
    import yaml

    from trainyard.run_file.yaml_text import StrictDumper

    # One line per value: a long config is not folded, and a diff shows whole values.
    return yaml.dump(document, Dumper=StrictDumper, sort_keys=False, width=10**9)


def print_json(document: Any) -> None:
    """Print a document as indented JSON on standard output."""
    typer.echo(json.dumps(document, indent=2))
