"""The run without faults, with whose weights a drill or a soak compares its own."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from trainyard.cluster.cluster import Cluster
from trainyard.cluster.kuberay import RayjobApi
from trainyard.drills.drill_run import DrillJob, Say
from trainyard.errors import RunFailed
from trainyard.platform import Platform
from trainyard.submission.run_folder.reader_pod import open_folder
from trainyard.submission.submit import delete_and_wait, submit_rayjob
from trainyard.submission.watch import watch_submission
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.identity import identity_of
from trainyard_trainer.run_files import names

Object = dict[str, Any]

UNDISTURBED = "undisturbed"
"""The suffix of the name of the run without a fault."""


class FolderReader(Protocol):
    """The methods of a run's folder that a drill needs."""

    def files(self) -> list[str]: ...
    def read(self, file: str) -> str | None: ...
    def sum(self, file: str) -> str | None: ...


def weights_of(folder: FolderReader, config: TrainerConfig) -> str | None:
    """Return the SHA-256 of the weights of a run that has succeeded with this config, else None."""
    run, summary = folder.read(names.RUN), folder.read(names.SUMMARY)
    if run is None or summary is None or json.loads(summary)["outcome"] != "succeeded":
        return None
    return (
        folder.sum(names.MODEL)
        if _weight_keys(json.loads(run)) == _weight_keys(_plain(config))
        else None
    )


def _plain(config: TrainerConfig) -> Object:
    return config.model_dump(mode="json")


def _weight_keys(config: Object) -> Object:
    """Return the keys of a config that determine the exact weights."""
    length = {"epochs": config["train"]["epochs"]}
    return identity_of(config) | length | {"scaling": config["scaling"]}


def train_undisturbed(cluster: Cluster, platform: Platform, job: DrillJob, say: Say) -> str | None:
    """Return the SHA-256 of the weights of the same run without a fault. Train the run if necessary.

    Return None for an elastic run: its weights depend on the number of workers at each step.
    """
    if job.config.scaling.is_elastic:
        return None
    with open_folder(cluster, platform, job.run) as folder:
        weights = weights_of(folder, job.config)
        if weights is None:
            folder.set_aside()
    if weights is not None:
        say(f"run {job.run} was trained before; its weights are used for the comparison")
        return weights
    say(f"training run {job.run} without a fault, to compare the weights")
    return train_to_end(cluster, platform, job)


def train_to_end(cluster: Cluster, platform: Platform, job: DrillJob) -> str:
    """Train the run, or resume it, and return the SHA-256 of its weights. Raises RunFailed if it fails."""
    rayjobs = RayjobApi(cluster)
    submit_rayjob(rayjobs, job.rayjob, lambda: None)
    *_, last = watch_submission(cluster, job.name, job.run)
    if last.phase != "succeeded":
        raise RunFailed(
            f"run {job.run} has {last.phase}, although no fault was injected",
            f"To find the cause: `trainyard explain {job.run} {cluster.options}`.",
        )
    delete_and_wait(rayjobs, job.name)
    with open_folder(cluster, platform, job.run) as folder:
        weights = weights_of(folder, job.config)
    if weights is None:
        raise RunFailed(f"run {job.run} has succeeded, but its folder has no model.pt")
    return weights


class TrainedBeside:
    """The run without faults, trained in rounds in a thread of its own while another run trains."""

    def __init__(self, cluster: Cluster, platform: Platform) -> None:
        self._cluster = cluster
        self._platform = platform
        self._rounds: list[tuple[DrillJob, Future[str]]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="undisturbed")

    def train(self, job: DrillJob) -> None:
        """Train a round when those before it have ended. The first one begins from scratch."""
        is_first = not self._rounds
        self._rounds.append((job, self._thread.submit(self._train, job, is_first)))

    def _train(self, job: DrillJob, is_first: bool) -> str:
        if is_first:
            with open_folder(self._cluster, self._platform, job.run) as folder:
                folder.set_aside()
        return train_to_end(self._cluster, self._platform, job)

    def weights(self) -> str:
        """Wait for all rounds, and return the SHA-256 of the weights after the last one.

        Raises RunFailed if one has failed.
        """
        *_, weights = [trained.result() for _, trained in self._rounds]
        return weights

    def close(self) -> None:
        """End the round that is trained, and cancel the others."""
        for job, trained in self._rounds:
            if not trained.cancel() and not trained.done():
                delete_and_wait(RayjobApi(self._cluster), job.name)
        self._thread.shutdown()
