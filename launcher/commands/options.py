"""The options that several commands take, and what they say: a run, its name, a platform."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

if TYPE_CHECKING:
    from launcher.config import RunConfig
    from launcher.overlay import Overlay
    from launcher.plan import Plan
    from launcher.platform import Platform

NAMESPACE = "trainyard"


def _check_namespace(namespace: str) -> str:
    """The namespace, if it can be one. Raises ConfigError."""
    if re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", namespace):
        return namespace
    from launcher.errors import ConfigError

    raise ConfigError(
        f"--namespace = {namespace!r}: must be at most 63 lower case letters, digits and dashes, "
        "with no dash at either end"
    )


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
    from launcher import config

    return config.load_run(path, settings or (), gpus=gpus, workers=workers, name=name)


def run_name(name: str) -> str:
    """A run's name, given as itself or as the run file that holds it."""
    from launcher.config import check_name, load_name

    if name.endswith((".yaml", ".yml")):
        return load_name(Path(name))
    return check_name(name, "NAME")


def platform_of(
    path: Path | None, from_cluster: bool, namespace: str, cluster: Any = None
) -> Platform:
    """The platform asked for; says on standard error which one it is."""
    from launcher.errors import ConfigError
    from launcher.platform import CONFIG_MAP, load_platform, platform_of_config_map

    if path is not None and from_cluster:
        raise ConfigError("--platform and --from-cluster exclude each other")
    if not from_cluster:
        typer.echo(f"platform: {path or 'packaged (the chart at its default values)'}", err=True)
        return load_platform(path)
    if cluster is None:
        from launcher.cluster import Cluster

        cluster = Cluster(namespace)
    typer.echo(f"platform: ConfigMap {namespace}/{CONFIG_MAP}", err=True)
    return platform_of_config_map(cluster.get("ConfigMap", CONFIG_MAP), namespace)


def objects_of(run: RunConfig, platform: Platform, namespace: str) -> tuple[Plan, dict[str, Any]]:
    """The one path from run to RayJob that `render` and `submit` share; the RayJob obeys all rules."""
    from launcher import rules
    from launcher.merge import merge
    from launcher.plan import plan_run
    from launcher.render import render_job

    planned = plan_run(run, platform, namespace, code_of(run))
    job = merge(render_job(planned), platform, planned)
    for warning in rules.require(job, platform.kuberay, platform.ray_version):
        typer.echo(f"warning: {warning}", err=True)
    return planned, job


def code_of(run: RunConfig) -> Overlay | None:
    """The code that travels with the run, packed; None where there is none."""
    from launcher.config import OwnRun
    from launcher.overlay import pack

    if isinstance(run, OwnRun) and run.code is not None:
        return pack(Path(run.code))
    return None


def yaml_text(document: Any) -> str:
    import yaml

    # One line per value: a long config is not folded, and a diff shows whole values.
    return yaml.dump(
        document, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False, width=10**9
    )


def print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2))
