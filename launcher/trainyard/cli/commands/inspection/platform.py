"""The commands `platform get` and `platform diff`: what the chart has published in a namespace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from trainyard.cli.options import (
    NAMESPACE,
    Context,
    Json,
    Namespace,
    open_cluster,
    print_json,
    yaml_text,
)

if TYPE_CHECKING:
    from trainyard.platform import Platform


def platform_get(namespace: Namespace = NAMESPACE, context: Context = None) -> None:
    """Print the platform of a namespace; saved to a file, it is the value of `--platform`."""
    from trainyard.platform import CONFIG_MAP, CONFIG_MAP_KEY, platform_of_config_map

    config_map = open_cluster(namespace, context).get("ConfigMap", CONFIG_MAP)
    platform_of_config_map(config_map, namespace)
    assert config_map is not None
    typer.echo(config_map["data"][CONFIG_MAP_KEY], nl=False)


def platform_diff(
    file: Annotated[
        Optional[Path],
        typer.Option(
            "--file",
            metavar="FILE",
            help="A platform file, or the output of `helm template` for the chart.",
        ),
    ] = None,
    with_namespace: Annotated[
        Optional[str],
        typer.Option(
            "--with", metavar="NAMESPACE", help="Compare with the platform of another namespace."
        ),
    ] = None,
    namespace: Namespace = NAMESPACE,
    context: Context = None,
    as_json: Json = False,
) -> None:
    """Show what another platform would change for later runs, such as that of a `helm upgrade`.

    FILE is - for standard input, as in: helm template ... | trainyard platform diff --file -.
    Submitted runs keep their platform. Exits 0 without a change, 1 with changes.
    """
    from trainyard.cli import show
    from trainyard.errors import ConfigError
    from trainyard.planning.comparison.platform_diff import RUNNING, diff_platforms, diff_pre_pull

    if (file is None) == (with_namespace is None):
        raise ConfigError("platform diff needs one of --file FILE and --with NAMESPACE")
    after = _published_by_file(file) if file is not None else _published(with_namespace, context)
    before = _published(namespace, context)
    changes = diff_platforms(before.platform, after.platform)
    if before.pre_pull is None or after.pre_pull is None:
        show.say(f"pre-pull pods are not compared: {before.unknown or after.unknown}")
    else:
        changes += diff_pre_pull(before.pre_pull, after.pre_pull)
    if as_json:
        print_json([asdict(one) for one in changes])
    elif changes:
        rows = [(one.path, _shown(one.before), _shown(one.after), one.affects) for one in changes]
        show.table(("field", "before", "after", "affects"), rows)
    show.say(RUNNING if changes else "no change")
    if changes:
        raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """What the chart has made, or would make, as far as `platform diff` compares it."""

    platform: Platform
    pre_pull: Mapping[str, dict[str, Any]] | None
    """The templates of the pre-pull pods by pool; None if they could not be read."""
    unknown: str = ""
    """Why they could not be read."""


def _published(namespace: str | None, context: str | None) -> Published:
    """Read the platform and the pre-pull pods of a namespace."""
    from trainyard.errors import ClusterError
    from trainyard.planning.comparison.platform_diff import pre_pull_pods
    from trainyard.platform import CONFIG_MAP, platform_of_config_map

    cluster = open_cluster(str(namespace), context)
    platform = platform_of_config_map(cluster.get("ConfigMap", CONFIG_MAP), cluster.namespace)
    try:
        return Published(platform=platform, pre_pull=pre_pull_pods(cluster.list("DaemonSet")))
    except ClusterError as error:
        if error.reason != "Forbidden":
            raise
    unknown = f"no permission to list DaemonSets in namespace {cluster.namespace}"
    return Published(platform=platform, pre_pull=None, unknown=unknown)


def _published_by_file(path: Path) -> Published:
    """Read a platform file, or the platform and the pre-pull pods of rendered manifests."""
    from trainyard.planning.comparison.platform_diff import platform_of_manifests, pre_pull_pods
    from trainyard.platform import parse_platform
    from trainyard.run_file.yaml_text import read_documents

    documents = read_documents(path)
    first = documents[0] if documents else None
    if isinstance(first, dict) and "formatVersion" in first:
        platform = parse_platform(yaml_text(first), str(path))
        unknown = f"{path} is a platform alone; use the output of `helm template`"
        return Published(platform=platform, pre_pull=None, unknown=unknown)
    platform = platform_of_manifests(documents, str(path))
    return Published(platform=platform, pre_pull=pre_pull_pods(documents))


def _shown(value: object) -> str:
    return "-" if value is None else str(value)
