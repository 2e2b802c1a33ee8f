"""The commands `explain` and `preflight`: find the cause of a failure, and check a cluster before use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from trainyard.cli.options import (
    NAMESPACE,
    Context,
    Gpus,
    Json,
    Name,
    Namespace,
    PlatformFile,
    RunName,
    Settings,
    Workers,
    load_run_with_options,
    local_path,
    objects_with_warnings,
    open_cluster_to_change,
    platform_of,
    print_json,
    run_name,
    yaml_text,
)
from trainyard.run import snapshot_of

if TYPE_CHECKING:
    from trainyard.cluster.cluster import Cluster
    from trainyard.diagnosis.preflight.facts import ClusterFacts
    from trainyard.run_file.models import RunConfig


def explain(
    name: RunName,
    namespace: Namespace = NAMESPACE,
    context: Context = None,
    as_json: Json = False,
    save: Annotated[
        Optional[Path],
        typer.Option(
            metavar="FILE",
            parser=local_path,
            help="Also write all objects and logs that were read, without the values of variables.",
        ),
    ] = None,
) -> None:
    """Find out why a run waits or has failed: the cause, the evidence for it, and the remedy."""
    from trainyard.diagnosis.catalogue import explain
    from trainyard.diagnosis.text import explanation_lines

    snapshot = snapshot_of(open_cluster_to_change(namespace, context), run_name(name))
    if save is not None:
        _write(save, yaml_text(snapshot.to_plain()))
    explanation = explain(snapshot)
    if as_json:
        print_json(explanation.to_plain())
    else:
        typer.echo("\n".join(explanation_lines(explanation)))


def preflight(
    run_file: Annotated[
        Optional[Path],
        typer.Argument(
            metavar="[RUN.yaml]", help="A run file, whose pods are compared with quota and nodes."
        ),
    ] = None,
    settings: Settings = None,
    gpus: Gpus = None,
    workers: Workers = None,
    name: Name = None,
    platform_file: PlatformFile = None,
    namespace: Namespace = NAMESPACE,
    context: Context = None,
    as_json: Json = False,
) -> None:
    """Check before a run uses GPUs that it can work here: rights, Secrets, quota, nodes, image, storage."""
    from dataclasses import asdict

    from trainyard.cli import show
    from trainyard.diagnosis.preflight.checks import checks

    run = (
        None if run_file is None else load_run_with_options(run_file, settings, gpus, workers, name)
    )
    found = checks(_facts(open_cluster_to_change(namespace, context), run, platform_file))
    if as_json:
        print_json([asdict(check) for check in found])
    else:
        show.table(
            ("check", "state", "seen", "remedy"),
            [(check.name, check.state, check.seen, check.remedy) for check in found],
        )
    if any(check.state == "failed" for check in found):
        raise typer.Exit(1)


def _facts(cluster: Cluster, run: RunConfig | None, platform_file: Path | None) -> ClusterFacts:
    """Gather what the checks need. Raises ConfigError if the platform cannot run the run file."""
    from dataclasses import replace

    from trainyard.diagnosis.preflight.facts import RECEIVER
    from trainyard.diagnosis.probe import (
        claims_of_volumes,
        keys_of_secrets,
        run_probe,
        survey,
        try_operator,
        would_refuse,
    )
    from trainyard.errors import ClusterError, ConfigError

    facts = survey(cluster)
    if facts.silence:
        return facts
    try:
        platform = platform_of(platform_file, platform_file is None, cluster.namespace, cluster)
    except (ClusterError, ConfigError) as error:
        return replace(facts, platform_problem=error.what)
    answered_s = None if facts.missing_kinds else try_operator(cluster, platform)
    facts = replace(
        facts, platform=platform, answered_s=answered_s, is_silent=answered_s == float("inf")
    )
    image = platform.image
    if run is not None:
        objects = objects_with_warnings(run, platform, cluster.namespace)
        image = objects.plan.image
        refused = "" if facts.missing_kinds else would_refuse(cluster, objects.job)
        volumes = objects.plan.volumes
        secrets = dict(objects.plan.trainer.secrets)
        notify = objects.plan.trainer.notify
        if notify is not None and notify.secret is not None:
            secrets[RECEIVER] = notify.secret
        facts = replace(
            facts,
            job=objects.job,
            job_refused=refused,
            volumes=volumes,
            claims=claims_of_volumes(cluster, volumes),
            secrets=secrets,
            secret_keys=keys_of_secrets(cluster, secrets.values()),
        )
    return replace(facts, probe=run_probe(cluster, platform, image))


def _write(path: Path, text: str) -> None:
    """Write a text file. Raises ConfigError if it cannot be written."""
    from trainyard.errors import ConfigError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--save {path} cannot be written: {error.strerror}") from error
