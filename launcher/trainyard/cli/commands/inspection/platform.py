"""The commands `platform get` and `platform diff`: what the chart has published in a namespace."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

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
    from trainyard.planning.comparison.platform_diff import RUNNING, diff_platforms

    if (file is None) == (with_namespace is None):
        raise ConfigError("platform diff needs one of --file FILE and --with NAMESPACE")
    after = (
        _platform_of_file(file) if file is not None else _platform_in(str(with_namespace), context)
    )
    changes = diff_platforms(_platform_in(namespace, context), after)
    if as_json:
        print_json([asdict(one) for one in changes])
    elif changes:
        rows = [(one.path, _shown(one.before), _shown(one.after), one.affects) for one in changes]
        show.table(("field", "before", "after", "affects"), rows)
    show.say(RUNNING if changes else "no change")
    if changes:
        raise typer.Exit(1)


def _platform_in(namespace: str, context: str | None) -> Platform:
    from trainyard.platform import CONFIG_MAP, platform_of_config_map

    return platform_of_config_map(
        open_cluster(namespace, context).get("ConfigMap", CONFIG_MAP), namespace
    )


def _platform_of_file(path: Path) -> Platform:
    from trainyard.planning.comparison.platform_diff import platform_of_manifests
    from trainyard.platform import parse_platform
    from trainyard.run_file.yaml_text import read_documents

    documents = read_documents(path)
    first = documents[0] if documents else None
    if isinstance(first, dict) and "formatVersion" in first:
        return parse_platform(yaml_text(first), str(path))
    return platform_of_manifests(documents, str(path))


def _shown(value: object) -> str:
    return "-" if value is None else str(value)
