"""DeepSpeed's ZeRO: the same training as with copies, saved in its own format and delivered whole."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from attempts import Attempts, check_metrics, committed, ray_config, wait_for
from pydantic import ValidationError
from saved_run import GOAL
from test_fsdp2 import (
    UNEVEN_STEPS,
    UNEVEN_VALIDATION,
    Attribute,
    Program,
    distance,
    final_weights,
    learner_of,
    losses,
    train,
)
from torch import nn
from training import (
    gloo_worker,
    metrics,
    open_folder,
    run_processes,
    same,
    small_config,
    step_losses,
    task_of,
)

from trainyard_trainer.attempt import checks
from trainyard_trainer.checkpointing import resume
from trainyard_trainer.checkpointing.checkpoint import (
    Checkpoints,
)
from trainyard_trainer.checkpointing.shards import SHARDS, enum_member
from trainyard_trainer.checkpointing.zero import (
    GETATTR,
    OF_MODEL,
    OF_OPTIMIZER,
    ONE_FOR_ALL,
    ZeroShards,
    whole,
)
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.strategies import DeepSpeedConfig
from trainyard_trainer.engine.worker import work
from trainyard_trainer.errors import ConfigError, RunError
from trainyard_trainer.parallel.torch_strategy import local_shard
from trainyard_trainer.parallel.zero import ZeroStrategy
from trainyard_trainer.run_folder.measurements.progress import Trained

CONSTANT = {"train__schedule": {"name": "constant"}}
"""So that the first epoch of two is what the only one is."""

# Adam takes whole steps where gradients are about 0: with several passes a step that is no longer rounding.
IMAGES = UNEVEN_STEPS | CONSTANT | {"train__optimizer": {"name": "sgd"}}
BATCH_NORM = UNEVEN_VALIDATION | CONSTANT
TEXT: dict[str, Any] = {
    # The table of bytes is used twice, and large enough to be shared out.
    "train__recipe": "language_model",
    "train__model": {"layers": 2, "heads": 2, "width": 64, "context_length": 16},
    "train__global_batch_size": 60,
    "train__micro_batch_size": 15,
    "train__optimizer": {"name": "adamw"},
    "train__clip_norm": 1.0,
    "data__drop_last": False,
    **CONSTANT,
}


def zero(storage: Path, stage: int = 3, offload: str = "none", **changes: Any) -> TrainerConfig:
    """A run of two workers; their number is not changed."""
    return small_config(
        storage,
        **{
            "scaling__num_workers": 2,
            **changes,
            "train__strategy": "deepspeed",
            "train__deepspeed": {"stage": stage, "offload": offload},
        },
    )


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The same run in four ways."""

    undisturbed: TrainerConfig
    cut: TrainerConfig
    """Its first epoch."""
    resumed: TrainerConfig
    """The second one, after that."""
    copied: TrainerConfig
    """With `ddp`."""

    @classmethod
    def of(cls, folder: Path, stage: int, offload: str, **changes: Any) -> Runs:
        return cls(
            undisturbed=zero(folder / "zero", stage, offload, **changes),
            cut=zero(folder / "cut", stage, offload, **changes, train__epochs=1),
            resumed=zero(folder / "cut", stage, offload, **changes),
            copied=small_config(folder / "ddp", **changes, scaling__num_workers=2),
        )

    def train(self, folder: Path) -> list[dict[str, Any]]:
        """With two processes, which train one run after the other; what each of them tells.

        `kept`: how many numbers it keeps of the weights of the model, and of its optimiser's.
        By the name of each run: the loss of each step, over all workers.
        """
        run_processes(train_all, (folder, self), 2)
        return [torch.load(folder / f"told-{rank}") for rank in range(2)]


def train_all(rank: int, folder: Path, runs: Runs) -> None:
    told: dict[str, Any] = {}
    with gloo_worker(rank, 2, f"{folder}/meet") as worker:
        for name in ("undisturbed", "cut", "resumed", "copied"):
            config = getattr(runs, name)
            Path(config.storage.path).mkdir(exist_ok=True)
            number = 2 if config is runs.resumed else 1
            task = worker.from_rank_zero(task_of(config, number) if rank == 0 else None)
            with step_losses(worker) as told[name]:
                work(task, worker)
        config = runs.undisturbed
        learner = learner_of(config, worker)
        shares = ZeroShards(Checkpoints(open_folder(config))).shares(learner)
        optimizer = shares[OF_OPTIMIZER.format(rank)]["optimizer_state_dict"]
        is_whole = "single_partition_of_fp32_groups" in optimizer
        groups = optimizer["single_partition_of_fp32_groups" if is_whole else "fp32_flat_groups"]
        told["kept"] = [
            sum(local_shard(each).numel() for each in learner.network.parameters()),
            sum(group.numel() for group in groups),
        ]
        torch.save(told, folder / f"told-{rank}")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 kB of numbers and spaces."""
    file = tmp_path_factory.mktemp("text") / "cubes.txt"
    file.write_text(" ".join(str(number**3) for number in range(500)))
    return file


@pytest.mark.ci
@pytest.mark.parametrize(
    ("stage", "offload", "changes"),
    [
        pytest.param(3, "none", TEXT, id="3"),
        pytest.param(1, "optimizer", TEXT, id="1-offload", marks=pytest.mark.slow),
        pytest.param(3, "all", TEXT, id="3-offload", marks=pytest.mark.slow),
        pytest.param(1, "none", IMAGES, id="1", marks=pytest.mark.slow),
        pytest.param(2, "none", IMAGES, id="2", marks=pytest.mark.slow),
        pytest.param(3, "none", BATCH_NORM, id="3-batch-norm", marks=pytest.mark.slow),
        pytest.param(
            3, "none", {**TEXT, "train__precision": "bf16"}, id="3-bf16", marks=pytest.mark.slow
        ),
    ],
)
def test_it_learns_what_ddp_learns_step_by_step_and_goes_on_with_the_same_bits(
    tmp_path: Path, text: Path, stage: int, offload: str, changes: dict[str, Any]
) -> None:
    if "train__recipe" in changes:
        changes = {**changes, "data__source": str(text)}
    runs = Runs.of(tmp_path, stage, offload, **changes)
    told = runs.train(tmp_path)
    # As DDP, but sums come in another order.
    is_rounded = runs.copied.train.precision == "bf16"
    of_steps = told[0]["copied"]
    assert len(of_steps) == metrics(runs.copied)[-1]["step"] > 4
    assert told[0]["undisturbed"] == pytest.approx(of_steps, rel=1e-3 if is_rounded else 1e-4)
    assert losses(runs.undisturbed) == pytest.approx(losses(runs.copied), rel=1e-3)
    weights, copied = final_weights(runs.undisturbed), final_weights(runs.copied)
    assert distance(weights, copied) < (1e-3 if is_rounded else 1e-5)
    # The same bits after a resume.
    assert [record["epoch"] for record in metrics(runs.resumed, "epoch")] == [1, 2]
    assert same(final_weights(runs.resumed), weights)
    # What each worker keeps.
    count = sum(weight.numel() for name, weight in copied.items() if not is_buffer(name))
    shares = [each / count for of_one in told for each in of_one["kept"]]
    assert shares == pytest.approx([0.5 if stage == 3 else 1.0, 0.5] * 2, abs=0.02)
    # DeepSpeed's own tool finds the same weights in its files.
    from deepspeed.utils import zero_to_fp32  # takes seconds, which no other test needs

    (newest, *_) = Checkpoints(open_folder(runs.resumed)).names()
    path = Checkpoints(open_folder(runs.resumed)).path(newest)
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(path, tag=SHARDS)
    assert same(found, weights)


def is_buffer(name: str) -> bool:
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def shard_three_weights(rank: int, folder: Path) -> None:
    strategy = ZeroStrategy(DeepSpeedConfig(stage=1), clip_norm=0.0, dtype=None)
    model = nn.Linear(2, 1)
    with gloo_worker(rank, 1, f"{folder}/meet") as worker:
        optimizer = torch.optim.SGD(model.parameters())
        strategy.wrap_optimizer(strategy.wrap_model(model, worker), optimizer, worker)


@pytest.mark.ci
def test_a_model_may_have_an_odd_number_of_weights(tmp_path: Path) -> None:
    run_processes(shard_three_weights, (tmp_path,), 1)


def check_shards_of_uneven_weights(rank: int, folder: Path) -> None:
    torch.use_deterministic_algorithms(True)  # uninitialised memory is filled with NaN
    strategy = ZeroStrategy(DeepSpeedConfig(stage=3), clip_norm=0.0, dtype=None)
    model = nn.Linear(5, 1)
    with gloo_worker(rank, 2, f"{folder}/meet") as worker:
        optimizer = torch.optim.SGD(model.parameters())
        strategy.wrap_optimizer(strategy.wrap_model(model, worker), optimizer, worker)
        shards = {name: local_shard(weight) for name, weight in model.named_parameters()}
    assert [len(shards[name]) for name in ("weight", "bias")] == [3, 1]
    assert all(shard.isfinite().all() for shard in shards.values())


@pytest.mark.ci
def test_the_padding_of_a_shard_is_not_taken_for_weights_that_have_diverged(tmp_path: Path) -> None:
    run_processes(check_shards_of_uneven_weights, (tmp_path,), 2)


@pytest.mark.ci
def test_its_shards_are_for_as_many_workers_as_have_written_them(tmp_path: Path) -> None:
    folder = open_folder(zero(tmp_path))
    folder.write(folder.run, zero(tmp_path).model_dump_json())
    resume.check_identity(folder, zero(tmp_path))
    with pytest.raises(ConfigError, match=r"num_workers: 2 -> 4 .*\n +Use 2 workers\."):
        resume.check_identity(folder, zero(tmp_path, scaling__num_workers=4))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"scaling__min_workers": 1}, "make scaling.num_workers one number, or use strategy fsdp2"),
        ({"train__ema_decay": 0.9}, "ema_decay does not fit strategy deepspeed"),
        ({"train__compile": True}, "compile does not fit strategy deepspeed"),
        ({"train__precision": "fp16"}, "strategy deepspeed does not do; use bf16, or ddp"),
        ({"stage": 2, "offload": "all"}, "offload = all needs stage 3"),
    ],
)
def test_what_does_not_fit_it_is_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValidationError, match=problem):
        zero(tmp_path, **changes)


def test_what_is_missing_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="offload = all takes weights off a GPU"):
        checks.check(zero(tmp_path, offload="all"))
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError, match=r"pip install 'trainyard\[deepspeed\]'"):
        checks.check(zero(tmp_path))


@pytest.mark.parametrize("file", [ONE_FOR_ALL, OF_MODEL.format(0)])
def test_nothing_of_what_somebody_put_in_place_of_its_files_is_run(
    tmp_path: Path, file: str
) -> None:
    checkpoints = Checkpoints(open_folder(small_config(tmp_path)))
    name = checkpoints.save(
        Trained(),
        attempt=1,
        group=1,
        contents={file: Program(tmp_path / "trace")},
        facts={"config": {}, "data": {}, "goal": asdict(GOAL)},
    )
    with pytest.raises(RunError, match="holds no weights that may be loaded"):
        whole(checkpoints, name)
    assert not (tmp_path / "trace").exists()


def test_files_of_a_python_that_pickles_enum_members_as_attributes_are_read(tmp_path: Path) -> None:
    from deepspeed.runtime.zero.config import ZeroStageEnum

    checkpoints = Checkpoints(open_folder(small_config(tmp_path)))
    content = {"module": {"w": torch.ones(2)}, "stage": Attribute(ZeroStageEnum, "weights")}
    name = checkpoints.save(
        Trained(),
        attempt=1,
        group=1,
        contents={ONE_FOR_ALL: content},
        facts={"config": {}, "data": {}, "goal": asdict(GOAL)},
    )
    assert whole(checkpoints, name)["w"].tolist() == [1, 1]
    known = {"deepspeed.runtime.zero.config.ZeroStageEnum": ZeroStageEnum, GETATTR: enum_member}
    assert checkpoints.load(name, ONE_FOR_ALL, known)["stage"] is ZeroStageEnum.weights


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed"])
def test_a_worker_with_a_share_of_the_weights_needs_less_memory_than_one_of_ddp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    # What is freed is gone from a process, in holes of its heap, too.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**18))
    text = tmp_path / "cubes.txt"
    text.write_text(" ".join(str(number**3) for number in range(100)))
    # 143 million parameters: with gradients and Adam's two averages 2.3 GB.
    model = {"layers": 24, "heads": 8, "width": 704, "context_length": 8}
    changes = {
        **TEXT,
        "data__source": str(text),
        "train__model": model,
        "train__epochs": 1,
        "train__global_batch_size": 32,
        "train__micro_batch_size": 8,
    }
    most = []
    for each in (strategy, "ddp"):
        config = small_config(
            tmp_path / each, **changes, scaling__num_workers=2, train__strategy=each
        )
        # Of what a forked process has from its parent, nobody knows whose memory it is.
        train(config, is_fresh=True)
        (epoch,) = metrics(config, "epoch")
        most.append(epoch["memory_bytes"])
    assert most[0] < most[1] - 300 * 2**20


@pytest.mark.slow
def test_workers_on_ray_that_lose_one_go_on_from_the_shards(attempts: Attempts) -> None:
    changes = {"train__strategy": "deepspeed", "train__epochs": 6, "checkpoint__every_samples": 500}
    config = ray_config(attempts, **changes, checkpoint__keep=99)
    driver = attempts.start(config)
    assert wait_for(lambda: committed(config), 240)
    os.kill(attempts.processes("RayTrainWorker")[0], signal.SIGKILL)
    output, _ = driver.communicate()
    assert driver.returncode == 0, output
    check_metrics(config, 6)
    assert {name.partition("-")[2] for name in committed(config)} == {"a1.1", "a1.2"}
    undisturbed = ray_config(attempts, **changes, name="undisturbed")
    attempts.finish(undisturbed)
    weights = [torch.load(attempts.storage / run / "model.pt") for run in ("small", "undisturbed")]
    assert same(*weights)
