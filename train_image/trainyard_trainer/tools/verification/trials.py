"""Train a few steps of a run in new processes, and observe losses, gradients, weights and sample ids."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from trainyard_trainer.checkpointing.checkpoint import MODEL, STATE, Checkpoints
from trainyard_trainer.checkpointing.resume import Start
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.recipes import best_goal
from trainyard_trainer.data.loading.rows import RunData
from trainyard_trainer.data.loading.torch_loader import TorchBatches
from trainyard_trainer.engine.learning.learner import Learner
from trainyard_trainer.engine.recipe_errors import recipe_errors_explained
from trainyard_trainer.errors import RunError
from trainyard_trainer.parallel.worker import BACKENDS, Worker
from trainyard_trainer.recipes.recipe import collate_of
from trainyard_trainer.run_files.programs import code_imports
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.progress import Length, Trained
from trainyard_trainer.tools.verification.hidden_state import bytes_of, changes, snapshot
from trainyard_trainer.tools.verification.step_probe import StepFinding, StepProbe

CPU = torch.device("cpu")

BATCH = 8
"""The largest global batch of a trial, in samples."""

TIMEOUT_S = 120.0
"""Seconds after which the processes of a trial are killed."""

SETTLED = 2
"""Steps after which values that are computed once and kept do not change any more."""

FEWEST_STEPS = SETTLED + 1
"""The smallest number of steps of a trial: with fewer, nothing can change after the first ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The settings of a trial, which trains a few steps."""

    workers: int = 1
    strategy: str = "ddp"
    micro_batch_size: int | None = None
    steps: int
    """The number of steps from the beginning of the run, of which a resumed trial makes the last ones."""
    start: str | None = None
    """The name of the checkpoint from which it resumes."""
    save_after: int | None = None
    """The number of steps after which a checkpoint is saved."""
    kill_after: int | None = None
    """The number of steps after which the processes are killed."""
    has_dropout: bool = True
    """Whether layers of dropout drop anything. Their random numbers differ between workers."""
    is_probed: bool = False
    """Whether the calls inside a step are watched, which makes it slower."""


@dataclass(kw_only=True, slots=True)
class Observed:
    """The results of a trial, collected from all of its workers."""

    losses: list[float] = field(default_factory=list)
    """The mean loss of each step."""
    digests: list[str] = field(default_factory=list)
    """The SHA-256 of all weights and buffers after each step; of unsharded models only."""
    ids: list[list[int]] = field(default_factory=list)
    """The samples of each step."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """The gradients of the first step, by parameter."""
    saved: list[str] = field(default_factory=list)
    """The names of the checkpoints that were saved."""
    wait_share: float = 0.0
    """The share of the time in which the loop waited for data."""
    hidden: list[str] = field(default_factory=list)
    """What changes in training, and is in no checkpoint."""
    findings: list[StepFinding] = field(default_factory=list)
    """Calls in a step that are not repeatable, or that wait for the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What all trials of a verification have in common."""

    config: TrainerConfig
    data: RunData
    steps: int
    folder: str
    """The folder of a run in which the trials save checkpoints."""

    @property
    def batch_size(self) -> int:
        """The global batch: even, so that two workers can share it."""
        return max(2, min(self.config.train.global_batch_size, BATCH) // 2 * 2)

    @property
    def length(self) -> Length:
        """An epoch of these steps, whose last batch has two samples less than the others."""
        size = self.batch_size
        ragged = size - 2 if size > 2 else size
        samples = min((self.steps - 1) * size + ragged, self.data.num_train)
        return Length(epochs=1, num_samples=samples, global_batch_size=size, drop_last=False)

    def config_of(self, trial: Trial) -> TrainerConfig:
        """Return the run's config, on CPUs and in full precision, with what the trial changes."""
        changed = {
            "strategy": trial.strategy,
            "micro_batch_size": trial.micro_batch_size,
            "global_batch_size": self.batch_size,
            "precision": "fp32",
            "compile": False,
        }
        scaling = {"num_workers": trial.workers, "use_gpu": False, "cpus_per_worker": 1}
        return self.config.model_copy(
            update={
                "train": self.config.train.model_copy(update=changed),
                "scaling": self.config.scaling.model_copy(update=scaling),
                "data": self.config.data.model_copy(update={"decode_workers": 0}),
            }
        )

    def checkpoints(self) -> list[str]:
        """Return the names of all checkpoints that trials have saved."""
        return Checkpoints(RunFolder.open(self.folder, self.config.name)).names()

    def run(self, trial: Trial) -> Observed:
        """Run a trial in processes of its own. Raises RunError with the first error of a worker."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        before = {*self.checkpoints()}
        with tempfile.TemporaryDirectory(prefix="trainyard-verify-") as scratch:
            processes: list[BaseProcess] = [
                context.Process(
                    target=_work,
                    args=(rank, code_imports.installed(), self, trial, scratch),
                    daemon=True,
                )
                for rank in range(trial.workers)
            ]
            for process in processes:
                process.start()
            _join(processes)
            errors = [Path(scratch, f"error-{rank}") for rank in range(trial.workers)]
            if found := [file.read_text() for file in errors if file.exists()]:
                raise RunError(found[0])
            codes = [process.exitcode for process in processes]
            if trial.kill_after is not None:
                if codes != [-signal.SIGKILL] * trial.workers:
                    raise RunError(f"the processes to be killed ended with the exit codes {codes}")
                return Observed(saved=[*set(self.checkpoints()) - before])
            if any(codes):
                raise RunError(f"the processes of a trial ended with the exit codes {codes}")
            plain = torch.load(f"{scratch}/observed", weights_only=True)
        findings = [StepFinding(**each) for each in plain.pop("findings")]
        return Observed(findings=findings, **plain)


def _join(processes: Sequence[BaseProcess]) -> None:
    """Wait for all processes, and kill what is left after TIMEOUT_S."""
    end = time.monotonic() + TIMEOUT_S
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()


def _work(rank: int, folders: list[str], bench: Bench, trial: Trial, scratch: str) -> None:
    """Be one of the processes of a trial. Errors and what rank 0 has observed become files."""
    code_imports.install(folders)
    torch.set_num_threads(1)
    try:
        with recipe_errors_explained(bench.config):
            worker = _joined(rank, trial.workers, scratch)
            observed = _Steps(bench, trial, worker).run()
    except Exception as error:  # noqa: BLE001 - the recipe may raise anything
        Path(scratch, f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None
    if rank == 0:
        torch.save(asdict(observed), f"{scratch}/observed")
    if trial.workers > 1:
        distributed.barrier()
        distributed.destroy_process_group()


def _joined(rank: int, workers: int, scratch: str) -> Worker:
    if workers > 1:
        distributed.init_process_group(
            BACKENDS["cpu"], init_method=f"file://{scratch}/meeting", rank=rank, world_size=workers
        )
    return Worker(rank=rank, world_size=workers, device=CPU)


class _Steps:
    """The steps of a trial on one worker."""

    def __init__(self, bench: Bench, trial: Trial, worker: Worker) -> None:
        self.trial, self.worker, self.length = trial, worker, bench.length
        self.config, self.data = bench.config_of(trial), bench.data
        self.checkpoints = Checkpoints(RunFolder.open(bench.folder, self.config.name))
        self.start = Start.of(self.checkpoints.folder, trial.start)
        is_resumed = trial.start is not None
        self.learner = Learner(self.config, self.data, self.length, worker, is_resumed=is_resumed)
        if not trial.has_dropout:
            remove_dropout(self.learner.network)
        if self.start.weights is not None and self.start.state is not None:
            self.learner.load(self.start.weights, self.start.state["learner"])
        self.observed = Observed()

    def run(self) -> Observed:
        trial, observed, learner = self.trial, self.observed, self.learner
        first = self.start.trained.steps_in_epoch
        if trial.save_after == first:
            self._save(first)
        batches = TorchBatches(
            self.data,
            self.length,
            self.start.trained,
            self.worker,
            self.config,
            collate_of(learner.recipe),
        ).epoch(0)
        waited, settled, began = 0.0, {}, time.perf_counter()
        probe = StepProbe()
        watching = probe.watching if trial.is_probed else nullcontext
        with probe if trial.is_probed else nullcontext():
            for step in range(first, min(trial.steps, self.length.steps_per_epoch)):
                asked = time.perf_counter()
                batch = next(batches)
                waited += time.perf_counter() - asked
                scatter_global_generators()
                sums = learner.new_sums()
                with watching():
                    learner.step(batch, sums, epoch=0, step_in_epoch=step)
                self._observe(sums.over_workers(self.worker), batch.ids)
                if step + 1 == trial.save_after:
                    self._save(step + 1)
                if step + 1 == trial.kill_after:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step + 1 == first + SETTLED:
                    settled = snapshot(learner.recipe, learner.network)
        observed.wait_share = waited / max(time.perf_counter() - began, 1e-9)
        if settled:
            observed.hidden = changes(settled, snapshot(learner.recipe, learner.network))
        observed.findings = list(probe.findings)
        return observed

    def _observe(self, sums: torch.Tensor, ids: torch.Tensor) -> None:
        """Note what a step has done. All workers call it."""
        observed, network = self.observed, self.learner.network
        loss, _ = self.learner.new_sums().compute(sums)
        observed.losses.append(loss)
        observed.ids.append([each for part in self.worker.gathered(ids.tolist()) for each in part])
        if not observed.gradients:
            observed.gradients = {
                name: whole(parameter.grad)
                for name, parameter in network.named_parameters()
                if parameter.grad is not None
            }
        if not self.learner.strategy.is_sharded:
            observed.digests.append(digest_of(network))

    def _save(self, step: int) -> None:
        """Save a checkpoint of an unsharded model, as rank 0 of a run does."""
        if self.worker.rank:
            return
        trained = Trained(
            step=step, samples=self.length.samples_until(0, step), steps_in_epoch=step
        )
        number = len(self.checkpoints.names()) + 1
        name = self.checkpoints.save(
            trained,
            attempt=number,
            group=1,
            contents={
                MODEL: self.learner.network.state_dict(),
                STATE: {"learner": self.learner.state(), "partial_epoch": {}},
            },
            facts={
                "config": self.config.model_dump(mode="json"),
                "data": asdict(self.data.info),
                "goal": asdict(best_goal(self.config.train, None)),
            },
        )
        self.observed.saved.append(name)


def scatter_global_generators() -> None:
    """Give `random` and `numpy.random` another state in each trial.

    Reading a sample of the user's data set seeds them, which would hide that a step draws from them.
    """
    random.seed()
    np.random.seed()


def whole(gradient: torch.Tensor) -> torch.Tensor:
    """Return a copy of a gradient, gathered from all workers if it is sharded."""
    full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return full.detach().double().clone()


def digest_of(network: nn.Module) -> str:
    """Return the SHA-256 of all weights and buffers that a checkpoint has."""
    digest = hashlib.sha256()
    for name, value in network.state_dict().items():
        digest.update(name.encode())
        digest.update(bytes_of(value))
    return digest.hexdigest()


def remove_dropout(network: nn.Module) -> None:
    """Let layers of dropout pass everything."""
    for module in network.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0


def batch_norms(network: nn.Module) -> list[str]:
    """Return the names of the layers whose result for a sample depends on the others of its pass."""
    kinds = nn.modules.batchnorm._BatchNorm
    return [name for name, module in network.named_modules() if isinstance(module, kinds)]
