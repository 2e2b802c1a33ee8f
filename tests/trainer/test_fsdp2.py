"""Weights shared out over workers: the same training as with copies, saved and resumed share by share."""

from __future__ import annotations

import io
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from attempts import Attempts, check_metrics, committed, ray_config, wait_for
from saved_run import damage
from torch import distributed, nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from training import (
    gloo_worker,
    metrics,
    open_folder,
    run_processes,
    same,
    small_config,
    task_of,
    train_and_tell,
    train_as_rank,
)

from trainyard_trainer.attempt import checks
from trainyard_trainer.checkpointing import resume
from trainyard_trainer.checkpointing.checkpoint import (
    Checkpoints,
)
from trainyard_trainer.checkpointing.shards import METADATA, SHARDS, Shards, _Unpickler, whole
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.loading.torch_loader import TorchBatches
from trainyard_trainer.engine.learning.learner import Learner
from trainyard_trainer.engine.learning.optimizers import WeightAverage
from trainyard_trainer.engine.learning.sums import LossSums
from trainyard_trainer.errors import ConfigError, RunError
from trainyard_trainer.parallel.strategy import strategy_of
from trainyard_trainer.parallel.torch_strategy import local_shard
from trainyard_trainer.parallel.units import units
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.recipes.image_classification.model import build_model
from trainyard_trainer.recipes.saved_model import LAST, deliver, read_saved
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.progress import Length, Trained

LIMIT_S = 60.0
"""A wait that takes longer has failed."""

UNEVEN_VALIDATION: dict[str, Any] = {
    # Of two workers one has a batch of validation images more. A step is one pass: with several, sums come in
    # another order, and batch norm makes as much of that between two runs with `ddp`.
    "data__valid_share": 0.15,
    "train__micro_batch_size": 134,
    "train__global_batch_size": 268,
    # At 0.02 a rounding, which depends on the CPU, grows a hundredfold in each of the last steps.
    "train__optimizer": {"name": "sgd", "learning_rate": 0.01},
}
UNEVEN_STEPS: dict[str, Any] = {
    # Without batch norm; and in the last step of an epoch one of two workers has a pass more.
    "train__model__name": "squeezenet1_1",
    "train__model__image_size": 32,
    "data__valid_share": 0.33,
    "data__drop_last": False,
    "train__micro_batch_size": 86,
    "train__global_batch_size": 344,
    "train__optimizer": {"name": "adamw"},
    "train__clip_norm": 1.0,
}
ALL_STATE: dict[str, Any] = UNEVEN_STEPS | {
    "train__schedule": {"name": "constant"},
    "train__ema_decay": 0.9,
}
"""A run with all that is shared out."""


def fsdp2(storage: Path, workers: int = 2, **changes: Any) -> TrainerConfig:
    return small_config(
        storage, **{"train__strategy": "fsdp2", "scaling__num_workers": workers, **changes}
    )


def train(config: TrainerConfig, attempt: int = 1, *, is_fresh: bool = False) -> None:
    """Train with processes of their own, as many as the config says."""
    workers = config.scaling.num_workers
    storage = Path(config.storage.path)
    storage.mkdir(exist_ok=True)
    meet = str(storage / f"meet-{attempt}")
    run_processes(train_as_rank, (workers, meet, config, attempt), workers, is_fresh=is_fresh)


def losses_of_steps(*configs: TrainerConfig) -> list[list[float]]:
    """Train these runs with the same processes; the loss of each step, over all workers."""
    for config in configs:
        Path(config.storage.path).mkdir(exist_ok=True)
    meet, told = (f"{configs[0].storage.path}/{name}" for name in ("meet", "told"))
    workers = configs[0].scaling.num_workers
    run_processes(train_and_tell, (meet, list(configs), told), workers)
    of_runs: list[list[float]] = torch.load(told)
    return of_runs


def final_weights(config: TrainerConfig) -> dict[str, torch.Tensor]:
    return read_saved(open_folder(config), LAST).weights


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Of all weights together, by their length."""
    assert found.keys() == wanted.keys()
    one, other = (
        torch.cat([weights[name].flatten().double() for name in wanted])
        for weights in (found, wanted)
    )
    return float((one - other).norm() / other.norm())


def losses(config: TrainerConfig) -> list[float]:
    ended = metrics(config, "epoch")
    return [record[key] for record in ended for key in ("loss", "val_loss")]


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        pytest.param(UNEVEN_VALIDATION, 1e-4, id="plain", marks=pytest.mark.slow),
        pytest.param(
            ALL_STATE | {"train__optimizer": {"name": "sgd"}},
            1e-4,
            id="all state",
            marks=pytest.mark.ci,
        ),
        # Sums come in another order, and Adam takes whole steps where gradients are about 0.
        pytest.param(ALL_STATE, 1e-3, id="adam", marks=pytest.mark.slow),
    ],
)
def test_it_learns_what_ddp_learns_step_by_step(
    tmp_path: Path, changes: dict[str, Any], tolerance: float
) -> None:
    shared = fsdp2(tmp_path / "fsdp2", **changes)
    copied = fsdp2(tmp_path / "ddp", **changes, train__strategy="ddp")
    of_shared, of_copied = losses_of_steps(shared, copied)
    assert len(of_copied) == metrics(copied)[-1]["step"] > 4
    assert of_shared == pytest.approx(of_copied, rel=tolerance)
    assert losses(shared) == pytest.approx(losses(copied), rel=tolerance)
    assert distance(final_weights(shared), final_weights(copied)) < 10 * tolerance


@pytest.mark.ci
@pytest.mark.parametrize("workers", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_goes_on_from_the_shares_with_the_same_and_with_another_number_of_workers(
    tmp_path: Path, workers: int
) -> None:
    undisturbed = fsdp2(tmp_path / "whole", **ALL_STATE)
    train(undisturbed)
    train(fsdp2(tmp_path / "cut", **ALL_STATE, train__epochs=1))
    resumed = fsdp2(tmp_path / "cut", workers, **ALL_STATE)
    train(resumed, attempt=2)
    assert [record["epoch"] for record in metrics(resumed, "epoch")] == [1, 2]
    if workers == 2:
        assert same(final_weights(resumed), final_weights(undisturbed))
    else:
        assert losses(resumed) == pytest.approx(losses(undisturbed), rel=0.05)


def state_of(learner: Learner, shards: Shards) -> dict[str, torch.Tensor]:
    """All that is saved in shares, each tensor whole: the workers put it together."""
    return dict(flat(shards.shares(learner)))


def flat(content: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(content, torch.Tensor):
        yield path, content.full_tensor() if isinstance(content, DTensor) else content.clone()
    else:
        for name, inner in content.items():
            yield from flat(inner, f"{path}/{name}")


def learn_and_save(rank: int, folder: Path, config: TrainerConfig) -> None:
    """Two steps, by which all has changed."""
    torch.set_num_threads(1)
    with gloo_worker(rank, 2, f"{folder}/meet") as worker:
        task = worker.from_rank_zero(task_of(config) if rank == 0 else None)
        length = Length.of(config, task.data.num_train)
        learner = Learner(config, task.data, length, worker)
        batches = TorchBatches(task.data, length, Trained(), worker, config).epoch(0)
        for step, batch in enumerate(islice(batches, 2)):
            learner.step(batch, learner.new_sums(), epoch=0, step_in_epoch=step)
        shards = Shards(Checkpoints(open_folder(config)))
        shards.save("c", shards.shares(learner))
        state = state_of(learner, shards)
        if rank == 0:
            torch.save(state, folder / "saved")


def load(rank: int, folder: Path, config: TrainerConfig) -> None:
    torch.set_num_threads(1)
    workers = config.scaling.num_workers
    with gloo_worker(rank, workers, f"{folder}/meet-{workers}") as worker:
        learner = learner_of(config, worker)
        shards = Shards(Checkpoints(open_folder(config)))
        shards.load("c", learner)
        state = state_of(learner, shards)
        if rank == 0:
            torch.save(state, folder / f"loaded-{workers}")


@pytest.mark.ci
def test_any_number_of_workers_has_the_bits_that_two_have_saved(tmp_path: Path) -> None:
    changes = {**ALL_STATE, "train__global_batch_size": 96, "train__micro_batch_size": None}
    run_processes(learn_and_save, (tmp_path, fsdp2(tmp_path, **changes)), 2)
    saved = torch.load(tmp_path / "saved")
    last = "classifier.1.weight"
    for path in (f"model/{last}", f"optimizer/{last}/exp_avg_sq", f"average/{last}"):
        assert saved[f"/{path}"].any()
    assert {int(each) for name, each in saved.items() if name.endswith("/step")} == {2}
    load(0, tmp_path, fsdp2(tmp_path, 1, **changes))
    run_processes(load, (tmp_path, fsdp2(tmp_path, 3, **changes)), 3)
    for workers in (1, 3):
        assert same(torch.load(tmp_path / f"loaded-{workers}"), saved)


def train_while_nothing_is_written(rank: int, meeting_point: str, config: TrainerConfig) -> None:
    """The shares of the first epoch wait for a step of the second one, and that step for them to wait."""
    is_written, is_taken = threading.Event(), threading.Event()
    write, step = RunFolder.writing, Learner.step

    @contextmanager
    def late(folder: RunFolder, path: str, **options: Any) -> Iterator[Any]:
        if f"/{SHARDS}/" in path:
            is_written.set()
            assert is_taken.wait(LIMIT_S), "training waits for what is saved"
        with write(folder, path, **options) as stream:
            yield stream

    def taken(learner: Learner, batch: Batch, sums: LossSums, **place: int) -> float:
        if place["epoch"] == 1:
            assert is_written.wait(LIMIT_S), "nothing is saved"
        rate = step(learner, batch, sums, **place)
        if place["epoch"] == 1:
            is_taken.set()
        return rate

    with patch.object(RunFolder, "writing", late), patch.object(Learner, "step", taken):
        train_as_rank(rank, 2, meeting_point, config)


@pytest.mark.ci
@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_the_next_step_is_taken_before_any_worker_has_written_its_share(
    tmp_path: Path, strategy: str
) -> None:
    config = fsdp2(tmp_path, train__strategy=strategy)
    meet = str(tmp_path / "meet")
    run_processes(train_while_nothing_is_written, (meet, config), 2)
    assert [record["epoch"] for record in metrics(config, "epoch")] == [1, 2]
    assert len(list(Checkpoints(open_folder(config)).names())) == 2


@pytest.mark.ci
def test_what_is_delivered_is_whole_and_needs_nothing_of_us(tmp_path: Path) -> None:
    config = fsdp2(tmp_path, **ALL_STATE, train__epochs=1)
    train(config)
    folder = open_folder(config)
    checkpoints = Checkpoints(folder)
    newest = resume.choose(folder)
    assert newest is not None
    assert {"shards/.metadata", "shards/__0_0.distcp", "shards/__1_0.distcp", "state.pt"} <= set(
        newest.files
    )
    deliver(folder, checkpoints, newest)
    network = build_model(config.train.model)
    network.load_state_dict(torch.load(folder.model, weights_only=True))
    assert same(dict(network.state_dict()), final_weights(config))
    # The weights that were trained are there, too; and torch's own tools read them.
    trained = whole(checkpoints, newest.name, "model")
    assert trained.keys() == network.state_dict().keys()
    assert not same(trained, dict(network.state_dict()))
    template = {f"model.{name}": torch.empty_like(weight) for name, weight in trained.items()}
    path = Path(checkpoints.path(newest.name, "shards"))
    distributed.checkpoint.load(template, checkpoint_id=path, no_dist=True)
    assert same({name.removeprefix("model."): each for name, each in template.items()}, trained)


@pytest.mark.slow
def test_a_share_that_was_changed_is_passed_over(tmp_path: Path) -> None:
    config = fsdp2(tmp_path, **UNEVEN_VALIDATION, train__epochs=2)
    train(config)
    folder = open_folder(config)
    older, newer = sorted(Checkpoints(folder).names())
    damage(folder, newer, "shards/__1_0.distcp")
    chosen = resume.choose(folder)
    assert chosen is not None
    assert chosen.name == older


class Program:
    """Leaves a trace if it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.trace,))


@pytest.mark.ci
def test_nothing_of_what_somebody_put_in_place_of_the_shares_is_run(tmp_path: Path) -> None:
    folder = open_folder(small_config(tmp_path))
    checkpoints = Checkpoints(folder)
    folder.write(checkpoints.path("c", METADATA), pickle.dumps(Program(tmp_path / "trace")))
    with pytest.raises(RunError, match="is not a metadata file of tensors: it refers to pathlib"):
        whole(checkpoints, "c", "model")
    assert not (tmp_path / "trace").exists()


class Attribute:
    """Pickled as an attribute of something else, as some Pythons pickle a member of an Enum."""

    def __init__(self, of: Any, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (self.of, self.name))


def test_metadata_that_names_members_of_enums_as_attributes_is_read() -> None:
    pickled = pickle.dumps(Attribute(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"))
    read = _Unpickler(io.BytesIO(pickled)).load()
    assert read is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT


@pytest.mark.parametrize(
    ("of", "name"), [(torch.Size, "__class__"), (_MEM_FORMAT_ENCODING, "__subclasses__")]
)
def test_other_attributes_are_not_read(of: Any, name: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match="it gets the attribute"):
        _Unpickler(io.BytesIO(pickle.dumps(Attribute(of, name)))).load()


def learner_of(config: TrainerConfig, worker: Worker) -> Learner:
    task = worker.from_rank_zero(task_of(config) if worker.rank == 0 else None)
    return Learner(config, task.data, Length.of(config, task.data.num_train), worker)


def look_at_shares(rank: int, meeting_point: str, config: TrainerConfig, result: str) -> None:
    with gloo_worker(rank, 2, meeting_point) as worker:
        learner = learner_of(config, worker)
        shares = [local_shard(each).numel() for each in learner.network.parameters()]
        weights = [each.numel() for each in learner.network.parameters()]
        if rank == 0:
            torch.save((sum(shares), sum(weights)), result)


def save_in_mid_epoch(rank: int, meeting_point: str, config: TrainerConfig) -> None:
    """With batch norm statistics that tell of whom they are."""
    with gloo_worker(rank, 2, meeting_point) as worker:
        learner = learner_of(config, worker)
        for buffer in (*learner.network.buffers(), *learner.average.network.buffers()):
            buffer.fill_(rank)
        shards = Shards(Checkpoints(open_folder(config)))
        shards.save("c", shards.shares(learner))


@pytest.mark.ci
def test_what_is_saved_of_batch_norm_is_of_the_first_worker_whoever_writes_it(
    tmp_path: Path,
) -> None:
    config = fsdp2(tmp_path, train__ema_decay=0.9)
    run_processes(save_in_mid_epoch, (str(tmp_path / "meet"), config), 2)
    for part in ("model", "average"):
        saved = whole(Checkpoints(open_folder(config)), "c", part)
        statistics = [each for name, each in saved.items() if "running_" in name]
        assert statistics
        assert not any(each.any() for each in statistics)


def compare_averages(rank: int, meeting_point: str, config: TrainerConfig) -> None:
    """Compare the average of a sharded network with that of the whole network, after each of some steps."""
    torch.set_num_threads(1)
    with gloo_worker(rank, 2, meeting_point) as worker:
        learner = learner_of(config, worker)
        assert config.train.ema_decay
        expected = None
        for step in range(4):
            torch.manual_seed(step)
            with torch.no_grad():
                for weight in learner.network.parameters():
                    local_shard(weight).add_(torch.randn(local_shard(weight).shape))
                for buffer in learner.network.buffers():
                    buffer.add_(step)
            learner.average.update(learner.network)
            whole_network = build_model(config.train.model)
            whole_network.load_state_dict(dict(flat_of(learner.network)))
            expected = expected or WeightAverage(whole_network, config.train.ema_decay)
            expected.update(whole_network)
            assert same(dict(flat_of(learner.average.network)), expected.network.state_dict())


def flat_of(network: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, tensor in flat(network.state_dict()):
        yield path.removeprefix("/"), tensor


@pytest.mark.ci
def test_the_average_of_shards_has_the_bits_of_the_average_of_the_whole(tmp_path: Path) -> None:
    config = fsdp2(tmp_path, train__ema_decay=0.9)
    run_processes(compare_averages, (str(tmp_path / "meet"), config), 2)


@pytest.mark.ci
def test_each_of_two_workers_keeps_half_of_the_weights(tmp_path: Path) -> None:
    result = str(tmp_path / "result")
    config = fsdp2(tmp_path)
    run_processes(look_at_shares, (str(tmp_path / "meet"), config, result), 2)
    share, all_of_them = torch.load(result)
    assert share / all_of_them == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("name", "count"), [("resnet18", 8), ("vit_b_16", 12), ("convnext_tiny", 21), ("swin_t", 15)]
)
def test_blocks_are_gathered_one_after_the_other(name: str, count: int) -> None:
    changes = {"train__model__name": name, "train__model__image_size": 32}
    network = build_model(small_config(Path("/unused"), **changes).train.model)
    found = list(units(network))
    assert len(found) == count
    inside = [module for unit in found for module in unit.modules()]
    assert len({id(module) for module in inside}) == len(inside), "blocks lie in each other"
    assert not any(
        isinstance(unit, nn.Sequential) and type(unit) is nn.Sequential for unit in found
    )


# Its options.


def wrapped(storage: Path, network: nn.Module, worker: Worker, **options: Any) -> nn.Module:
    config = fsdp2(storage, train__fsdp2=options)
    return strategy_of(
        config.train, dtype=None, units_of=lambda each: list(units(each))
    ).wrap_model(network, worker)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("options", "computed_in", "is_given_up", "is_rounded"),
    [
        ({}, torch.float32, True, False),
        ({"reshard_after_forward": False}, torch.float32, False, False),
        ({"param_dtype": "bf16"}, torch.bfloat16, True, True),
        ({"reduce_dtype": "bf16"}, torch.float32, True, True),
    ],
    ids=["defaults", "reshard_after_forward", "param_dtype", "reduce_dtype"],
)
def test_an_option_changes_what_is_gathered_kept_and_added_up(
    tmp_path: Path,
    options: dict[str, Any],
    computed_in: torch.dtype,
    is_given_up: bool,
    is_rounded: bool,
) -> None:
    # Two blocks, and a layer too small for one, which belongs to the whole.
    layers = [nn.Linear(100, 100), nn.Linear(100, 100), nn.Linear(100, 10)]
    seen = []
    for layer in layers:
        layer.register_forward_hook(lambda module, *_: seen.append(module.weight.dtype))
    with gloo_worker(0, 1, str(tmp_path / "meet")) as worker:
        network = wrapped(tmp_path, nn.Sequential(*layers), worker, **options)
        loss = network(torch.randn(4, 100)).float().square().sum()
        assert seen == [computed_in] * 3
        assert [isinstance(layer.weight, DTensor) for layer in layers] == [is_given_up] * 3
        loss.backward()
        for layer in layers:
            assert local_shard(layer.weight).dtype == torch.float32
            gradient = local_shard(layer.weight.grad)
            assert gradient.any()
            assert torch.equal(gradient, gradient.bfloat16().float()) == is_rounded


@pytest.mark.parametrize("is_offloaded", [True, False])
def test_cpu_offload_is_asked_of_each_block_and_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_offloaded: bool
) -> None:
    # Without a GPU torch has no memory from which one could read.
    asked = []
    monkeypatch.setattr(
        "trainyard_trainer.parallel.fsdp2.fully_shard", lambda _, **told: asked.append(told)
    )
    with gloo_worker(0, 1, str(tmp_path / "meet")) as worker:
        wrapped(tmp_path, nn.Sequential(nn.Linear(100, 100)), worker, cpu_offload=is_offloaded)
    offloads = [isinstance(told["offload_policy"], CPUOffloadPolicy) for told in asked]
    assert offloads == [is_offloaded] * 2


def test_cpu_offload_without_a_gpu_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = fsdp2(tmp_path, train__fsdp2={"cpu_offload": True})
    with pytest.raises(ConfigError, match="cpu_offload = true takes weights off a GPU"):
        checks.check(config)


@pytest.mark.slow
def test_workers_on_ray_that_lose_one_go_on_from_the_shares(attempts: Attempts) -> None:
    config = ray_config(attempts, train__strategy="fsdp2", train__epochs=8, checkpoint__keep=99)
    driver = attempts.start(config)
    assert wait_for(lambda: committed(config), 120)
    os.kill(attempts.processes("RayTrainWorker")[0], signal.SIGKILL)
    output, _ = driver.communicate()
    assert driver.returncode == 0, output
    check_metrics(config, 8)
    assert {name.partition("-")[2] for name in committed(config)} == {"a1.1", "a1.2"}
    undisturbed = ray_config(attempts, train__strategy="fsdp2", train__epochs=8, name="undisturbed")
    attempts.finish(undisturbed)
    weights = [torch.load(attempts.storage / run / "model.pt") for run in ("small", "undisturbed")]
    assert same(*weights)
