"""Commands that turn a run file into numbers and objects, and need no cluster."""

from __future__ import annotations

import typer

from launcher.commands.options import (
    NAMESPACE,
    FromCluster,
    Gpus,
    Json,
    Name,
    Namespace,
    PlatformFile,
    RunFile,
    Settings,
    Workers,
    load_run,
    objects_of,
    platform_of,
    print_json,
    yaml_text,
)


def plan(
    run_file: RunFile,
    settings: Settings = None,
    gpus: Gpus = None,
    workers: Workers = None,
    name: Name = None,
    platform_file: PlatformFile = None,
    from_cluster: FromCluster = False,
    namespace: Namespace = NAMESPACE,
    as_json: Json = False,
) -> None:
    """Print the numbers of a run, each with its reason."""
    from launcher import show
    from launcher.plan import explain_plan, plan_run

    run = load_run(run_file, settings, gpus, workers, name)
    platform = platform_of(platform_file, from_cluster, namespace)
    reasons = explain_plan(plan_run(run, platform, namespace), run, platform)
    if as_json:
        print_json([{"name": row.name, "value": row.value, "why": row.why} for row in reasons])
    else:
        show.plan_table(reasons)


def render(
    run_file: RunFile,
    settings: Settings = None,
    gpus: Gpus = None,
    workers: Workers = None,
    name: Name = None,
    platform_file: PlatformFile = None,
    from_cluster: FromCluster = False,
    namespace: Namespace = NAMESPACE,
) -> None:
    """Write the objects of a run as YAML: what `submit` sends, for `kubectl apply -f`."""
    run = load_run(run_file, settings, gpus, workers, name)
    platform = platform_of(platform_file, from_cluster, namespace)
    _, job = objects_of(run, platform, namespace)
    typer.echo(yaml_text(job), nl=False)
