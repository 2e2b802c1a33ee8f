"""The commands of `trainyard`: load, call, show. Heavy imports stay inside, so `--help` is quick."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import typer

if TYPE_CHECKING:
    from launcher.config import RunConfig
    from launcher.errors import LauncherError
    from launcher.plan import Plan
    from launcher.platform import Platform
    from launcher.watch import Sight

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


app = typer.Typer(
    name="trainyard",
    add_completion=False,
    rich_markup_mode=None,
)
platform_app = typer.Typer(rich_markup_mode=None)
app.add_typer(platform_app, name="platform")
checkpoints_app = typer.Typer(rich_markup_mode=None)
app.add_typer(checkpoints_app, name="checkpoints")
data_app = typer.Typer(rich_markup_mode=None)
app.add_typer(data_app, name="data")

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.")]
RunName = Annotated[str, typer.Argument(metavar="NAME", help="The run's name, or its run file.")]
Settings = Annotated[
    Optional[list[str]],  # typer reads this at run time, on Python 3.10 too
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the run file: a.b=c."),
]
Gpus = Annotated[Optional[str], typer.Option(metavar="N", help="GPUs, instead of the file's.")]
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
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
AnyRun = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's name, its run file, or its folder's path.")
]
Storage = Annotated[
    str,
    typer.Option(metavar="DIR", help="Where the folders of runs lie; s3://bucket/prefix, too."),
]
Endpoint = Annotated[
    Optional[str],
    typer.Option(metavar="URL", help="Address of an S3 server that is not AWS."),
]
OneCheckpoint = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Which weights: `delivered` (the run's model.pt), `last`, `best`, or a checkpoint's name.",
    ),
]
ImageColumn = Annotated[
    Optional[str],
    typer.Option(
        metavar="NAME",
        help="Column of the images: paths in a manifest, bytes or pixels in Parquet.  [default: image]",
    ),
]
LabelColumn = Annotated[
    Optional[str],
    typer.Option(
        metavar="NAME", help="Column of the labels: numbers from 0, or names.  [default: label]"
    ),
]

RUNS = "runs"


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the whole traceback of an error.")
    ] = False,
) -> None:
    """One run file in, a trained model out: on a laptop, and on a KubeRay GPU cluster."""
    # --traceback is read in __main__, which handles all errors.
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
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

    run = _load_run(run_file, settings, gpus, workers, name)
    platform = _platform(platform_file, from_cluster, namespace)
    reasons = explain_plan(plan_run(run, platform, namespace), run, platform)
    if as_json:
        _print_json([{"name": row.name, "value": row.value, "why": row.why} for row in reasons])
    else:
        show.plan_table(reasons)


@app.command()
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
    run = _load_run(run_file, settings, gpus, workers, name)
    platform = _platform(platform_file, from_cluster, namespace)
    _, job = _objects(run, platform, namespace)
    typer.echo(_yaml(job), nl=False)


@app.command()
def submit(
    run_file: RunFile,
    settings: Settings = None,
    gpus: Gpus = None,
    workers: Workers = None,
    name: Name = None,
    platform_file: PlatformFile = None,
    namespace: Namespace = NAMESPACE,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the end.")] = False,
) -> None:
    """Show the plan, send the run to the cluster, and watch it to its end."""
    from launcher import show
    from launcher.cluster import Cluster
    from launcher.kuberay import RayjobApi
    from launcher.plan import explain_plan
    from launcher.submit import submit_run

    run = _load_run(run_file, settings, gpus, workers, name)
    cluster = Cluster(namespace)
    platform = _platform(platform_file, platform_file is None, namespace, cluster)
    planned, job = _objects(run, platform, namespace)
    show.plan_table(explain_plan(planned, run, platform))
    submitted = submit_run(RayjobApi(cluster), job)
    job_name = job["metadata"]["name"]
    show.say(
        {
            "created": f"RayJob {namespace}/{job_name} created",
            "live": f"RayJob {namespace}/{job_name} is live already",
            "resubmitted": f"RayJob {namespace}/{job_name} created again: the run goes on",
        }[submitted]
    )
    if not detach:
        _watch(cluster, run.name, job_name)


@app.command()
def watch(name: RunName, namespace: Namespace = NAMESPACE) -> None:
    """Show the progress of a run until it ends."""
    from launcher.cluster import Cluster
    from launcher.kuberay import RayjobApi

    name = _run_name(name)
    cluster = Cluster(namespace)
    _watch(cluster, name, _last_job(RayjobApi(cluster), name, namespace)["metadata"]["name"])


@app.command()
def status(
    name: Annotated[
        Optional[str], typer.Argument(metavar="[NAME]", help="A run's name, or its run file.")
    ] = None,
    namespace: Namespace = NAMESPACE,
    as_json: Json = False,
) -> None:
    """Show the submissions of a namespace, or one run with what its folder says."""
    from launcher import show
    from launcher.cluster import Cluster
    from launcher.kuberay import RUN_LABEL, RayjobApi
    from launcher.watch import attempts_of, look

    name = None if name is None else _run_name(name)
    cluster = Cluster(namespace)
    jobs = RayjobApi(cluster).list_jobs(name)
    sights = [(job, look(cluster, job)) for job in jobs]
    rows = [
        {
            "run": job["metadata"]["labels"][RUN_LABEL],
            "submission": sight.submission,
            "phase": sight.phase,
            "attempts": attempts_of(job.get("status", {})),
            "created": job["metadata"]["creationTimestamp"],
            "message": sight.message,
            "progress": sight.progress,
        }
        for job, sight in sights
    ]
    summary = None if name is None else _summary(cluster, name, sights[-1][1] if sights else None)
    if name is not None and not rows and summary is None:
        raise _no_run(name, namespace)
    if as_json:
        _print_json({"submissions": rows, "summary": summary})
        return
    headings = ("run", "submission", "phase", "attempts", "created", "message")
    show.table(headings, [[str(row[key]) for key in headings] for row in rows])
    if summary is not None:
        typer.echo(show.summary_text(summary))
    elif name is not None and sights and sights[-1][1].progress is not None:
        typer.echo(show.progress_text(sights[-1][1].progress))


@app.command()
def logs(
    name: RunName,
    namespace: Namespace = NAMESPACE,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on to the end.")] = False,
) -> None:
    """Print the driver's log: from the head, or from the run's folder when the cluster is gone."""
    from launcher.cluster import Cluster
    from launcher.kuberay import RayjobApi
    from launcher.reader import read_folder
    from launcher.watch import HEAD_CONTAINER, head_pod

    name = _run_name(name)
    cluster = Cluster(namespace)
    jobs = RayjobApi(cluster).list_jobs(name)
    ray_cluster = jobs[-1].get("status", {}).get("rayClusterName") if jobs else None
    pod = head_pod(cluster, ray_cluster) if ray_cluster else None
    if pod is not None and follow:
        _print_log(cluster.follow_log(pod, HEAD_CONTAINER))
        return
    if pod is not None:
        _print_log(cluster.log(pod, HEAD_CONTAINER).splitlines())
        return
    platform = _platform(None, True, namespace, cluster)
    kept = sorted(
        (
            file
            for file in (read_folder(cluster, platform, name) or "").splitlines()
            if file.startswith("logs/attempt-")
        ),
        key=lambda file: int(file.removeprefix("logs/attempt-").removesuffix(".log")),
    )
    if not kept:
        raise _no_run(name, namespace)
    _print_log((read_folder(cluster, platform, name, kept[-1]) or "").splitlines())


@app.command()
def stop(name: RunName, namespace: Namespace = NAMESPACE) -> None:
    """Stop a run: its RayJob and cluster go, its folder stays, and `submit` resumes it."""
    from launcher import show
    from launcher.cluster import Cluster
    from launcher.kuberay import RayjobApi
    from launcher.submit import stop_run

    name = _run_name(name)
    stopped = stop_run(RayjobApi(Cluster(namespace)), name)
    for submission in stopped:
        show.say(f"RayJob {namespace}/{submission} stopped")
    if not stopped:
        show.say(f"run {name} is not live in {namespace}: nothing to stop")


@app.command()
def train(
    run_file: RunFile,
    storage: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the folders of runs lie.")
    ] = Path("runs"),
    settings: Settings = None,
    gpus: Gpus = None,
    workers: Workers = None,
    name: Name = None,
    without_ray: Annotated[
        bool, typer.Option("--without-ray", help="In one process: a baseline for Ray.")
    ] = False,
    torchrun: Annotated[
        bool, typer.Option("--torchrun", help="Under torchrun, plain DDP: another baseline.")
    ] = False,
) -> None:
    """Train on this machine, on a Ray of its own; a run that was there before goes on."""
    from launcher import show
    from launcher.errors import ConfigError
    from launcher.local import Way, local_config, train_locally

    if without_ray and torchrun:
        raise ConfigError(
            "--without-ray and --torchrun exclude each other: one process, or several"
        )
    way: Way = "alone" if without_ray else "torchrun" if torchrun else "ray"
    run = _load_run(run_file, settings, gpus, workers, name)
    try:
        config = local_config(run, storage, os.cpu_count() or 1, way)
        with closing(train_locally(config, way)) as sights:
            last = _show(sights)
    except KeyboardInterrupt:
        show.say(
            f"run {run.name} was interrupted: the same command goes on from its last checkpoint"
        )
        raise
    if last.summary is not None:
        typer.echo(show.summary_text(last.summary))


@platform_app.callback(invoke_without_command=True)
def platform_root(context: typer.Context) -> None:
    """What the chart publishes in a namespace."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@platform_app.command("get")
def platform_get(namespace: Namespace = NAMESPACE) -> None:
    """Print the platform of a namespace, to keep it as a file for `--platform`."""
    from launcher.cluster import Cluster
    from launcher.platform import CONFIG_MAP, CONFIG_MAP_KEY, platform_of_config_map

    config_map = Cluster(namespace).get("ConfigMap", CONFIG_MAP)
    platform_of_config_map(config_map, namespace)
    assert config_map is not None
    typer.echo(config_map["data"][CONFIG_MAP_KEY], nl=False)


@checkpoints_app.callback(invoke_without_command=True)
def checkpoints_root(context: typer.Context) -> None:
    """Look at the checkpoints of a run, clear them up, and take a model out."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@checkpoints_app.command("ls")
def checkpoints_ls(
    run: AnyRun, storage: Storage = RUNS, endpoint: Endpoint = None, as_json: Json = False
) -> None:
    """List the checkpoints of a run, newest first, by what their manifests say."""
    _tool("checkpoints", ["ls"], [_any_run(run)], storage=storage, endpoint=endpoint, json=as_json)


@checkpoints_app.command("verify")
def checkpoints_verify(
    run: AnyRun, storage: Storage = RUNS, endpoint: Endpoint = None, as_json: Json = False
) -> None:
    """Read all checkpoints of a run and compare their SHA-256; exit code 1 if one is damaged."""
    _tool(
        "checkpoints", ["verify"], [_any_run(run)], storage=storage, endpoint=endpoint, json=as_json
    )


@checkpoints_app.command("prune")
def checkpoints_prune(
    run: AnyRun,
    keep: Annotated[
        int, typer.Option(metavar="N", min=1, help="How many of the newest intact ones stay.")
    ],
    keep_best: Annotated[
        bool, typer.Option("--keep-best", help="The best one by validation stays, too.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be deleted.")
    ] = False,
    storage: Storage = RUNS,
    endpoint: Endpoint = None,
) -> None:
    """Delete older and damaged checkpoints of a run that is not being trained."""
    _tool(
        "checkpoints",
        ["prune"],
        [_any_run(run)],
        storage=storage,
        endpoint=endpoint,
        keep=keep,
        keep_best=keep_best,
        dry_run=dry_run,
    )


@checkpoints_app.command("export")
def checkpoints_export(
    run: AnyRun,
    out: Annotated[
        Optional[str],
        typer.Option(
            metavar="FILE", help="Where to; s3:// too.  [default: a file in <run's folder>/export]"
        ),
    ] = None,
    format: Annotated[  # noqa: A002 - the option's name
        Literal["state_dict", "torchscript", "pt2", "onnx"],
        typer.Option(
            help="`state_dict` for torch.load, `torchscript` for torch.jit.load, `pt2` for "
            "torch.export.load, `onnx` for other programs.",
        ),
    ] = "state_dict",
    checkpoint: OneCheckpoint = "delivered",
    storage: Storage = RUNS,
    endpoint: Endpoint = None,
) -> None:
    """Write a model out, and beside it, as FILE.json, its classes and how images are prepared."""
    _tool(
        "export",
        [],
        [_any_run(run)],
        storage=storage,
        endpoint=endpoint,
        out=out,
        format=format,
        checkpoint=checkpoint,
    )


@app.command()
def predict(
    run: AnyRun,
    images: Annotated[
        list[str], typer.Argument(metavar="IMAGE...", help="Picture files, such as PNG or JPEG.")
    ],
    top: Annotated[
        int,
        typer.Option(metavar="K", min=1, help="How many labels per image, the likeliest first."),
    ] = 1,
    grid: Annotated[
        Optional[Path],
        typer.Option(metavar="FILE.png", help="Draw the images with their labels, too."),
    ] = None,
    checkpoint: OneCheckpoint = "delivered",
    batch_size: Annotated[
        Optional[int], typer.Option(metavar="N", min=1, help="Images at once.  [default: 64]")
    ] = None,
    storage: Storage = RUNS,
    endpoint: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Print the labels that a run's model gives to images, and how sure it is."""
    _tool(
        "predict",
        [],
        [_any_run(run), *images],
        storage=storage,
        endpoint=endpoint,
        checkpoint=checkpoint,
        top=top,
        grid=grid,
        batch_size=batch_size,
        json=as_json,
    )


@data_app.callback(invoke_without_command=True)
def data_root(context: typer.Context) -> None:
    """Convert images to Parquet, and look at them."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@data_app.command("prepare")
def data_prepare(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="`digits`, or a path or s3:// URL of idx files, a folder with a sub-folder per "
            "class, a CSV or JSONL manifest, or Parquet files.",
        ),
    ],
    dest: Annotated[
        str, typer.Argument(metavar="DEST", help="The folder or s3://bucket/prefix to write.")
    ],
    valid: Annotated[
        Optional[str],
        typer.Option(metavar="SOURCE", help="Validation images; without them, a share of SOURCE."),
    ] = None,
    valid_share: Annotated[
        Optional[float],
        typer.Option(
            metavar="SHARE",
            help="Share of each class for validation, where SOURCE has no part for it.  [default: 0.2]",
        ),
    ] = None,
    size: Annotated[
        Optional[int],
        typer.Option(
            metavar="PIXELS",
            min=1,
            help="Height and width of all images: the middle of each, resized.  [default: the "
            "source's, where all are alike]",
        ),
    ] = None,
    channels: Annotated[
        Optional[Literal["1", "3"]],
        typer.Option(help="1 for grey, 3 for colour.  [default: as in the source]"),
    ] = None,
    encoding: Annotated[
        Literal["auto", "raw", "encoded"],
        typer.Option(
            help="Keep pixels, which train fastest, or picture files, which are smaller and decoded "
            "in training; `auto` takes what suits their size."
        ),
    ] = "auto",
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    max_bad_samples: Annotated[
        Optional[int],
        typer.Option(
            metavar="N", min=0, help="How many that cannot be read may be left out.  [default: 0]"
        ),
    ] = None,
    seed: Annotated[
        Optional[int],
        typer.Option(metavar="N", min=0, help="Seed of the split and of the order.  [default: 0]"),
    ] = None,
    endpoint: Endpoint = None,
    dest_endpoint: Annotated[
        Optional[str],
        typer.Option(metavar="URL", help="The same for DEST, if it is another one."),
    ] = None,
    jobs: Annotated[
        Optional[int],
        typer.Option(
            metavar="N", min=1, help="Threads that read and decode.  [default: one per CPU]"
        ),
    ] = None,
) -> None:
    """Convert images to Parquet that trains fast: shuffled, split, checked; the same command resumes."""
    _tool(
        "data",
        ["prepare"],
        [source, dest],
        valid=valid,
        valid_share=valid_share,
        size=size,
        channels=channels,
        encoding=encoding,
        image_column=image_column,
        label_column=label_column,
        max_bad_samples=max_bad_samples,
        seed=seed,
        endpoint=endpoint,
        dest_endpoint=dest_endpoint,
        jobs=jobs,
    )


@data_app.command("inspect")
def data_inspect(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="Whatever `prepare` takes, or what it has written."),
    ],
    grid: Annotated[
        Optional[Path],
        typer.Option(metavar="FILE.png", help="Draw a few images with their labels, too."),
    ] = None,
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    endpoint: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Show counts, classes, shapes and bytes of a data set."""
    _tool(
        "data",
        ["inspect"],
        [source],
        grid=grid,
        image_column=image_column,
        label_column=label_column,
        endpoint=endpoint,
        json=as_json,
    )


def _tool(module: str, command: list[str], words: list[str], **options: object) -> None:
    """Run a tool of the trainer on words and on the options that were given; end with its exit code."""
    from launcher.program import run_tool

    given = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            given.append(flag)
        elif value is not None and value is not False:
            given.append(f"{flag}={value}")
    raise typer.Exit(run_tool(module, [*command, *given, "--", *words]))


def _any_run(run: str) -> str:
    """A run's name, as itself or as the run file that holds it; or the path of its folder."""
    return run if "/" in run and not run.endswith((".yaml", ".yml")) else _run_name(run)


def _load_run(
    path: Path,
    settings: list[str] | None,
    gpus: str | None,
    workers: str | None,
    name: str | None,
) -> RunConfig:
    from launcher.config import load_run

    return load_run(path, settings or (), gpus=gpus, workers=workers, name=name)


def _run_name(name: str) -> str:
    """A run's name, given as itself or as the run file that holds it."""
    from launcher.config import check_name, load_name

    if name.endswith((".yaml", ".yml")):
        return load_name(Path(name))
    return check_name(name, "NAME")


def _platform(
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


def _objects(run: RunConfig, platform: Platform, namespace: str) -> tuple[Plan, dict[str, Any]]:
    """The one path from run to RayJob that `render` and `submit` share."""
    from launcher.merge import merge
    from launcher.plan import plan_run
    from launcher.render import render_job

    planned = plan_run(run, platform, namespace)
    return planned, merge(render_job(planned), platform, planned)


def _yaml(document: Any) -> str:
    import yaml

    # One line per value: a long config is not folded, and a diff shows whole values.
    return yaml.dump(
        document, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False, width=10**9
    )


def _print_log(lines: Iterable[str]) -> None:
    from launcher import show

    for line in lines:
        typer.echo(show.log_line(line))


def _print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2))


def _last_job(rayjobs: Any, name: str, namespace: str) -> dict[str, Any]:
    jobs = rayjobs.list_jobs(name)
    if not jobs:
        raise _no_run(name, namespace)
    last: dict[str, Any] = jobs[-1]
    return last


def _no_run(name: str, namespace: str) -> LauncherError:
    from launcher.errors import ConfigError

    return ConfigError(
        f"there is no run {name} in namespace {namespace}",
        f"`trainyard status -n {namespace}` lists the runs there.",
    )


def _watch(cluster: Any, run: str, submission: str) -> None:
    """Show a submission to its end; Ctrl-C leaves it running."""
    from launcher import show
    from launcher.errors import RunFailed
    from launcher.kuberay import RayjobApi
    from launcher.watch import watch_run

    try:
        last = _show(watch_run(cluster, RayjobApi(cluster), submission))
    except KeyboardInterrupt:
        show.say(f"detached: the run goes on; `trainyard watch {run} -n {cluster.namespace}`")
        raise
    logs = f"Logs: `trainyard logs {run} -n {cluster.namespace}`."
    if last.phase == "stopped":
        raise RunFailed(f"run {run} was stopped", logs)
    summary = _summary(cluster, run, last) if last.ran else None
    if last.phase == "failed":
        details = [summary["error"] if summary else None, last.message, logs]
        raise RunFailed(f"run {run} failed", *(text for text in details if text))
    if summary is not None:
        typer.echo(show.summary_text(summary))


def _show(sights: Iterable[Sight | str]) -> Sight:
    """Display sights and log lines as they come; returns the last sight."""
    from launcher import show

    last: Sight | None = None
    with show.ProgressView() as view:
        for sight in sights:
            if isinstance(sight, str):
                show.say(sight)
            else:
                view.show(sight)
                last = sight
    assert last is not None
    return last


def _summary(cluster: Any, name: str, last: Sight | None) -> dict[str, Any] | None:
    """What the run left in its folder: from the driver's last words, else through the reader pod."""
    from launcher.reader import read_folder
    from launcher.watch import ENDED

    if last is not None and (last.summary is not None or last.phase not in ENDED):
        return last.summary
    text = read_folder(
        cluster, _platform(None, True, cluster.namespace, cluster), name, "summary.json"
    )
    return None if text is None else json.loads(text)
