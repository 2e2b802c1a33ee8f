"""Publish the progress of the runs of a namespace in a ConfigMap.

    python -m trainyard_trainer.tools.pods.publish_progress CONFIGMAP

The chart's CronJob (`monitoring.progress`) runs this in its namespace. It lists the RayJobs there, reads
progress.json in the folder of each run, and replaces the data of the ConfigMap: one line for each run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainyard_trainer.config.trainer_config import AnyConfig
from trainyard_trainer.errors import StorageError
from trainyard_trainer.notices.api_server import ApiServer
from trainyard_trainer.notices.rayjobs import config_of, outcome_of, rayjobs
from trainyard_trainer.run_folder.folder import RunFolder


def publish(server: ApiServer, config_map: str) -> None:
    """Replace the data of a ConfigMap in the pod's namespace by a line about each run."""
    namespace = server.namespace
    lines = lines_of_runs(rayjobs(server.get, namespace))
    server.patch(
        f"/api/v1/namespaces/{namespace}/configmaps/{config_map}",
        [{"op": "add", "path": "/data", "value": lines}],
    )


def lines_of_runs(jobs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return a line about each run, by its name. Of several RayJobs of a run, the newest counts."""
    lines: dict[str, str] = {}
    for job in sorted(jobs, key=lambda job: str(job["metadata"]["creationTimestamp"])):
        if (config := config_of(job)) is not None:
            lines[config.name] = ", ".join(_parts(job.get("status") or {}, _progress(config)))
    return lines


def _parts(status: Mapping[str, Any], progress: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of a line: the state, and what is known of percent, step, loss and time left."""
    outcome = outcome_of(status)
    yield outcome or str(status.get("jobDeploymentStatus") or "new").lower()
    # What a program of the user reports may be text or a list.
    known = {key: value for key, value in progress.items() if isinstance(value, int | float)}
    percent, step, steps, loss, left_s = map(
        known.get, ("percent", "step", "steps", "loss", "eta_s")
    )
    if percent is not None:
        yield f"{percent:.1f} %"
    if step is not None:
        yield f"step {step}" + (f" of {steps}" if steps is not None else "")
    if loss is not None:
        yield f"loss {loss:.4g}"
    if left_s is not None and outcome is None:
        yield f"{_duration(left_s)} left"


def _progress(config: AnyConfig) -> dict[str, Any]:
    """Return the content of progress.json; empty if there is none yet, or if it cannot be read now."""
    folder = RunFolder.open(config.storage.path, config.name, config.storage.endpoint)
    try:
        progress: dict[str, Any] = json.loads(folder.read(folder.progress))
    except (
        StorageError,
        ValueError,
    ):  # a bucket may give the beginning of one and the end of the next
        return {}
    return progress


def _duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def main(arguments: list[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainyard_trainer.tools.pods.publish_progress", allow_abbrev=False
    )
    parser.add_argument("config_map", metavar="CONFIGMAP", help="its name in the pod's namespace")
    wanted = parser.parse_args(arguments)
    publish(ApiServer.of(environment), wanted.config_map)
    return 0


if __name__ == "__main__":
    sys.exit(main())
