"""The commands `plan` and `render`: the numbers of a run, and its RayJob as YAML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import typer

from trainyard.cli.commands.inspection.gpus import list_nodes
from trainyard.cli.options import (
    NAMESPACE,
    Context,
    FromCluster,
    Gpus,
    Json,
    Name,
    Namespace,
    PlatformFile,
    RunFile,
    Settings,
    Warm,
    Workers,
    load_run_with_options,
    objects_with_warnings,
    open_cluster,
    platform_of,
    print_json,
    yaml_text,
)

if TYPE_CHECKING:
    from trainyard.planning.reasons import Reason


def plan(
    run_file: RunFile,
    settings: Settings = None,
    gpus: Gpus = None,
    workers: Workers = None,
    name: Name = None,
    warm: Warm = False,
    platform_file: PlatformFile = None,
    from_cluster: FromCluster = False,
    namespace: Namespace = NAMESPACE,
    context: Context = None,
    as_json: Json = False,
) -> None:
    """Print the plan of a run, each number with its reason; with --from-cluster also the free nodes."""
    from trainyard.api import plan_run
    from trainyard.cli import show
    from trainyard.planning.reasons import explain_plan

    run = load_run_with_options(run_file, settings, gpus, workers, name, warm)
    if from_cluster and platform_file is None:
        cluster = open_cluster(namespace, context)
        platform = platform_of(None, True, namespace, cluster)
        objects = objects_with_warnings(run, platform, namespace)
        reasons = (*explain_plan(objects.plan, run, platform), *_capacity(cluster, objects.job))
    else:
        platform = platform_of(platform_file, from_cluster, namespace, context=context)
        reasons = explain_plan(plan_run(run, platform, namespace), run, platform)
    if as_json:
        print_json([{"name": row.name, "value": row.value, "why": row.why} for row in reasons])
    else:
        show.plan_table(reasons)


def _capacity(cluster: Any, job: dict[str, Any]) -> tuple[Reason, ...]:
    """Return how many pods of a RayJob fit on the nodes now. Raises ConfigError if it can never fit."""
    from trainyard.cli import show
    from trainyard.errors import ClusterError
    from trainyard.planning.capacity.fit import capacity_rows, fit_groups, require_capacity

    try:
        nodes = list_nodes(cluster)
    except ClusterError as error:
        if error.reason != "Forbidden":
            raise
        show.say(f"nodes are not checked: {error.what}. {' '.join(error.details)}")
        return ()
    fits = fit_groups(job, nodes)
    require_capacity(fits)
    return capacity_rows(fits)


def render(
    run_file: RunFile,
    settings: Settings = None,
    gpus: Gpus = None,
    workers: Workers = None,
    name: Name = None,
    warm: Warm = False,
    platform_file: PlatformFile = None,
    from_cluster: FromCluster = False,
    namespace: Namespace = NAMESPACE,
    context: Context = None,
    gitops: Annotated[
        Optional[Literal["flux", "argocd"]],
        typer.Option(
            "--gitops", help="Render for a tool that applies Git again and again: flux or argocd."
        ),
    ] = None,
    git: Annotated[
        bool,
        typer.Option(
            "--git",
            help="Write the git revision of the code or the run file into the RayJob, as `submit` does.",
        ),
    ] = False,
) -> None:
    """Print the RayJob of a run as YAML for `kubectl apply -f`: the same that `submit` creates."""
    from trainyard.errors import ConfigError
    from trainyard.planning.gitops import for_git
    from trainyard.planning.merge import with_source
    from trainyard.run_file.code.code_archive import require_to_travel
    from trainyard.run_file.code.source import source_of

    run = load_run_with_options(run_file, settings, gpus, workers, name, warm)
    platform = platform_of(platform_file, from_cluster, namespace, context=context)
    objects = objects_with_warnings(run, platform, namespace)
    require_to_travel(objects.plan.code)
    source = source_of(run, run_file) if git else None
    if git and source is None:
        raise ConfigError(
            f"--git: git knows no commit of {run_file} or of the run's code",
            "Run `trainyard render` in a checkout of the repository, or leave --git out.",
        )
    typer.echo(yaml_text(for_git(with_source(objects.job, source), gitops)), nl=False)
