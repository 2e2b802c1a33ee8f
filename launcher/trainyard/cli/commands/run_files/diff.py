"""The command `diff`: compare a run file with the last submission of its run."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

from trainyard.cli.options import (
    NAMESPACE,
    Context,
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
)


def diff(
    run_file: RunFile,
    settings: Settings = None,
    gpus: Gpus = None,
    workers: Workers = None,
    name: Name = None,
    warm: Warm = False,
    platform_file: PlatformFile = None,
    namespace: Namespace = NAMESPACE,
    context: Context = None,
    as_json: Json = False,
) -> None:
    """Show what a run file would change in the last submission of its run, and when that takes effect.

    A change has `no effect`, takes effect `at once` or at the `next attempt` if the RayJob is edited, needs
    a `new submission`, or is `refused`, because another model would be trained. trainyard edits no RayJob:
    `submit` creates a new one. Exits 0 without a change, 1 with changes.
    """
    from trainyard.cli import show
    from trainyard.planning.comparison.run_diff import diff_jobs
    from trainyard.run import last_job, no_run
    from trainyard.submission.submit import is_live

    run = load_run_with_options(run_file, settings, gpus, workers, name, warm)
    cluster = open_cluster(namespace, context)
    before = last_job(cluster, run.name)
    if before is None:
        raise no_run(run.name, cluster)
    platform = platform_of(platform_file, platform_file is None, namespace, cluster)
    after = objects_with_warnings(run, platform, namespace).job
    live = is_live(before)
    changes = diff_jobs(before, after, live=live)
    state = "live" if live else "ended"
    show.say(f"against RayJob {namespace}/{before['metadata']['name']}, {state}")
    if as_json:
        print_json([asdict(one) for one in changes])
    elif changes:
        rows = [
            (one.effect, one.path, _shown(one.before), _shown(one.after), one.why)
            for one in changes
        ]
        show.table(("effect", "field", "before", "after", "because"), rows)
    if any(one.effect == "refused" for one in changes):
        show.say("refused: give the run another name with --name")
    elif changes and live:
        show.say(f"to apply it: `trainyard stop {run.name} {cluster.options}`, then submit")
    elif changes:
        show.say("to apply it: submit; the run resumes from its last checkpoint")
    if changes:
        raise typer.Exit(1)


def _shown(value: object) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)
