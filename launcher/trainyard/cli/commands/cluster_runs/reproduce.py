"""The command `reproduce`: render the last submission of a run again."""

from __future__ import annotations

import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from trainyard.cli.commands.cluster_runs.submit import watch_to_end
from trainyard.cli.options import (
    NAMESPACE,
    Context,
    Namespace,
    PlatformFile,
    RunName,
    open_cluster_to_change,
    platform_of,
    print_warnings,
    run_name,
    yaml_text,
)
from trainyard.cli.tools import Endpoint
from trainyard.run import head_of, last_job, no_run
from trainyard_trainer.config.location import location_problem
from trainyard_trainer.run_files import names

if TYPE_CHECKING:
    from trainyard.cluster.cluster import Cluster
    from trainyard.platform import Platform
    from trainyard.quantities import Object
    from trainyard.run_file.code.code_archive import Overlay
    from trainyard.submission.run_folder.remote_folder import RemoteFolder
    from trainyard.submission.run_folder.reproduce import RenderedAgain, Submission

NEEDED = ("obstore", "pyarrow")
"""Packages with which the trainer reads a run's folder."""


def reproduce(
    name: RunName,
    namespace: Namespace = NAMESPACE,
    context: Context = None,
    platform_file: PlatformFile = None,
    submit: Annotated[
        bool, typer.Option("--submit", help="Submit it, too, and watch it until it ends.")
    ] = False,
    new_name: Annotated[
        Optional[str],
        typer.Option(
            "--name",
            metavar="NEW",
            help="Another name, under which the run starts from the beginning.",
        ),
    ] = None,
    storage: Annotated[
        Optional[str],
        typer.Option(
            metavar="DIR",
            help="The folder or s3://bucket/prefix with the folders of runs. Then no cluster is needed, and "
            "the output is a run file with which `trainyard train` repeats the run.",
        ),
    ] = None,
    endpoint: Endpoint = None,
) -> None:
    """Render the last submission of a run again, from the records in its folder."""
    from trainyard.cli import show
    from trainyard.errors import ConfigError
    from trainyard.run_file.validation import check_name

    name = run_name(name)
    if new_name is not None:
        check_name(new_name, "--name")
    if storage is not None:
        if (problem := location_problem(storage)) is not None:
            raise ConfigError(f"--storage {storage}: {problem}")
        if submit or platform_file is not None:
            raise ConfigError("--storage excludes --submit and --platform: no cluster is asked")
        _print_run_file(name, new_name, storage, endpoint)
    else:
        _render_again(name, new_name, namespace, context, platform_file, submit)
    if new_name is None and not submit:
        show.say(f"under its old name, run {name} resumes; --name NEW starts from the beginning")


# On a cluster.


def _render_again(
    name: str,
    new_name: str | None,
    namespace: str,
    context: str | None,
    platform_file: Path | None,
    submit: bool,
) -> None:
    from trainyard.planning.merge import with_source
    from trainyard.run_file.code.code_archive import require_to_travel
    from trainyard.submission.run_folder.reader_pod import open_folder
    from trainyard.submission.run_folder.reproduce import renamed, render_again

    cluster = open_cluster_to_change(namespace, context)
    platform = platform_of(None, True, namespace, cluster)
    head = head_of(cluster, last_job(cluster, name))
    with open_folder(cluster, platform, name, head) as folder:
        kept, code = _left_in(folder, cluster)
    if platform_file is not None:
        platform = platform_of(platform_file, False, namespace)
    rendered = render_again(kept.run, code, platform, namespace)
    _tell_changes(kept, rendered)
    if new_name is not None:
        rendered = render_again(renamed(kept.run, new_name), code, platform, namespace)
        if not submit:
            require_to_travel(code)
    print_warnings(rendered.warnings)
    job = with_source(rendered.job, kept.git)
    if submit:
        _submit(cluster, platform, job, new_name or name, code)
    else:
        typer.echo(yaml_text(job), nl=False)


def _left_in(folder: RemoteFolder, cluster: Cluster) -> tuple[Submission, Overlay | None]:
    """Read submission and code from the run's folder. Raises ConfigError if they are not there."""
    from trainyard.errors import ConfigError
    from trainyard.submission.run_folder.reproduce import code_of_archive, read_submission
    from trainyard_trainer.run_files import submission

    text = folder.read(names.SUBMISSION)
    if text is None and not folder.files():
        raise no_run(folder.run, cluster)
    if text is None:
        raise ConfigError(
            f"run {folder.run} has left no {names.SUBMISSION}: its image is older than that file",
            f"Its config is there: `trainyard cp {folder.run}:run.json . {cluster.options}`.",
        )
    kept = read_submission(text, f"{folder.run}:{names.SUBMISSION}")
    if kept.code_sha256 is None:
        return kept, None
    with tempfile.TemporaryDirectory() as place:
        file = submission.code_file(kept.code_sha256)
        (archive,) = folder.copy(file, Path(place) / "code.tar.gz")
        return kept, code_of_archive(archive.read_bytes(), kept.code_sha256)


def _tell_changes(kept: Submission, rendered: RenderedAgain) -> None:
    from trainyard.cli import show
    from trainyard.submission.run_folder.reproduce import changed_parts

    if changes := ", ".join(changed_parts(kept.parts, rendered.parts)):
        show.say(
            f"it differs from what was submitted: platform or launcher have changed since, in {changes}"
        )
    else:
        show.say(f"it equals what was submitted: RayJob {rendered.job['metadata']['name']}")


def _submit(
    cluster: Cluster, platform: Platform, job: Object, run: str, code: Overlay | None
) -> None:
    from trainyard.api import forget_failure, upload_of
    from trainyard.cli import show
    from trainyard.cluster.kuberay import RayjobApi
    from trainyard.submission.submit import submit_rayjob

    upload = upload_of(cluster, platform, run, code, show.UploadView(run))
    forget = partial(forget_failure, cluster, platform, run)
    submitted = submit_rayjob(RayjobApi(cluster), job, upload=upload, forget_failure=forget)
    show.say(f"RayJob {cluster.namespace}/{job['metadata']['name']}: {submitted}")
    watch_to_end(cluster, run, job["metadata"]["name"])


# On this machine.


def _print_run_file(name: str, new_name: str | None, storage: str, endpoint: str | None) -> None:
    from trainyard.cli import show
    from trainyard.submission.run_folder.reproduce import (
        read_config,
        read_submission,
        renamed,
        run_file,
    )
    from trainyard_trainer.run_files import submission

    if (text := _kept(storage, endpoint, name, names.SUBMISSION)) is not None:
        kept = read_submission(text, f"{name}/{names.SUBMISSION}")
    elif (text := _kept(storage, endpoint, name, names.RUN)) is not None:
        kept = read_config(text, f"{name}/{names.RUN}")
    else:
        raise _no_run_there(name, storage)
    code = None if kept.code_sha256 is None else f"{name}-code"
    typer.echo(yaml_text(run_file(renamed(kept.run, new_name), code)), nl=False)
    if code is not None:
        assert kept.code_sha256 is not None
        archive = f"{storage.rstrip('/')}/{name}/{submission.code_file(kept.code_sha256)}"
        show.say(f"its code: mkdir {code} && tar -xzf {archive} -C {code}")


def _kept(storage: str, endpoint: str | None, run: str, file: str) -> str | None:
    """Return the text of a file in a run's folder on this machine or S3, or None if it does not exist."""
    from trainyard.errors import RunFailed
    from trainyard.local.tools import require_packages
    from trainyard.submission.run_folder.remote_folder import storage_options
    from trainyard_trainer.config.storage import Storage
    from trainyard_trainer.run_files.exit_codes import NOT_FOUND
    from trainyard_trainer.run_files.programs.isolation import isolated

    require_packages(NEEDED, "`reproduce --storage`")
    where = storage_options(Storage(path=storage, endpoint=endpoint))
    command = isolated("trainyard_trainer.tools.folder", *where, run, file)
    # Files of the trainer are UTF-8, whatever the locale; one that is damaged is refused when it is parsed.
    ended = subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if ended.returncode == NOT_FOUND:
        return None
    if ended.returncode != 0:
        raise RunFailed(
            f"{file} of run {run} in {storage} could not be read",
            *ended.stderr.strip().splitlines()[-3:],
        )
    return ended.stdout


def _no_run_there(name: str, storage: str) -> Exception:
    from trainyard.errors import ConfigError

    return ConfigError(
        f"there is no run {name} in {storage}", "Name its storage with --storage DIR."
    )
