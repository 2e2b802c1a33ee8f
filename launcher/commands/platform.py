"""Commands about the platform: what the chart publishes in a namespace."""

from __future__ import annotations

import typer

from launcher.commands.options import NAMESPACE, Namespace


def platform_get(namespace: Namespace = NAMESPACE) -> None:
    """Print the platform of a namespace, to keep it as a file for `--platform`."""
    from launcher.cluster import Cluster
    from launcher.platform import CONFIG_MAP, CONFIG_MAP_KEY, platform_of_config_map

    config_map = Cluster(namespace).get("ConfigMap", CONFIG_MAP)
    platform_of_config_map(config_map, namespace)
    assert config_map is not None
    typer.echo(config_map["data"][CONFIG_MAP_KEY], nl=False)
