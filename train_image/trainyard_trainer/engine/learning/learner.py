"""The learner: network, optimizer and everything else that training changes, one step at a time."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.batch_share import share_batch
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.loading.rows import RunData, read_stand_in
from trainyard_trainer.engine.learning.kept_for_loss import KeptForLoss
from trainyard_trainer.engine.learning.loss_scale import LossScale
from trainyard_trainer.engine.learning.optimizers import (
    Precision,
    WeightAverage,
    build_optimizer,
    learning_rate,
    require_all_trained,
)
from trainyard_trainer.engine.learning.sums import EvaluationSums, LossSums, Validation, of_batches
from trainyard_trainer.engine.learning.trained_network import TrainedNetwork
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.kept_files import KeptFiles
from trainyard_trainer.parallel.activity import WAITING
from trainyard_trainer.parallel.strategy import strategy_of
from trainyard_trainer.parallel.torch_strategy import local_shard
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.recipes.initial_weights import load_initial_weights
from trainyard_trainer.recipes.loss import Loss
from trainyard_trainer.recipes.networks import (
    model_for,
    networks_of,
    parts_of,
    without_gradients,
)
from trainyard_trainer.recipes.recipe import Forward, collate_of
from trainyard_trainer.recipes.registry import recipe_of
from trainyard_trainer.recipes.trained_weights import load_weights, saved_weights
from trainyard_trainer.run_folder.measurements.progress import Length


class Learner:
    """One worker's copy or shard of the model, with its optimizer, loss scaler and weight average."""

    def __init__(
        self,
        config: TrainerConfig,
        data: RunData,
        length: Length,
        worker: Worker,
        *,
        is_resumed: bool = False,
        is_replacement: bool = False,
    ) -> None:
        """Build the model and the optimizer. A checkpoint is loaded afterwards if the run is resumed.

        With `is_replacement`, this needs no other worker; `join_group` follows, when it has their state.
        """
        self.train_config = config.train
        self.collective_timeout_s = config.faults.collective_timeout_s
        self.length = length
        self.worker = worker
        share = share_batch(config.train, worker.world_size)
        self.micro_batch_size = share.micro_batch_size
        self.precision = Precision.of(config.train.precision, worker.device)
        self.precision.set_for_process()
        self.data = data
        self.recipe = recipe_of(config, data.info)

        torch.manual_seed(config.train.seed)
        self.network = self.recipe.build_model()
        if config.train.init and not is_resumed:
            load_initial_weights(config.train.init, config.storage.endpoint, self.network)
        self.strategy = strategy_of(
            config.train,
            self.precision.dtype,
            self.recipe.fsdp_modules,
            accumulates=share.accumulation > 1,
        )
        if not self.strategy.is_sharded:
            self.network.to(worker.device)
        self.average = (
            WeightAverage(self.network, config.train.ema_decay) if config.train.ema_decay else None
        )
        # Spread the model over the workers.
        if self.strategy.is_sharded:
            self._shard_what_is_not_trained()
        wrapped = {
            name: module if is_replacement else self.strategy.wrap_model(module, worker)
            for name, module in networks_of(self.recipe, self.network).items()
        }
        self._read_first_weights(is_resumed)
        optimizers = {name: self._optimizer_of(name) for name in wrapped}
        require_all_trained(optimizers.values(), self.network)
        self.trained = [
            self._trained_network(name, each, optimizers[name]) for name, each in wrapped.items()
        ]
        """The networks that are trained in each step, in this order: mostly one, the whole model."""
        self.scaler = torch.amp.GradScaler(worker.device.type, enabled=self.precision.is_scaled)
        self.kept: KeptForLoss | None = None
        """What a replacement of this worker would need; None unless lost workers are replaced."""

    def _shard_what_is_not_trained(self) -> None:
        """Shard the weight average, and the networks that no optimizer trains, such as a teacher."""
        averaged = parts_of(self.recipe, self.average.network) if self.average else []
        trained = networks_of(self.recipe, self.network).values()
        others = [each for each in parts_of(self.recipe, self.network) if each not in trained]
        for module in (*averaged, *others):
            self.strategy.wrap_model(module, self.worker)

    def _optimizer_of(self, name: str | None) -> torch.optim.Optimizer:
        """Return a new optimizer for a network."""
        return build_optimizer(
            self.recipe.parameter_groups(networks_of(self.recipe, self.network)[name]),
            self.train_config,
            self.worker.device,
            network=name,
            is_sharded=self.strategy.is_sharded,
        )

    def _trained_network(
        self, name: str | None, wrapped: nn.Module, optimizer: torch.optim.Optimizer
    ) -> TrainedNetwork:
        """Return a network with its optimizer, as the strategy wraps both."""
        module = networks_of(self.recipe, self.network)[name]
        train, worker = self.train_config, self.worker
        wrapped, optimizer = self.strategy.wrap_optimizer(wrapped, optimizer, worker)
        return TrainedNetwork(
            name=name,
            module=module,
            wrapped=wrapped,
            model=cast(nn.Module, torch.compile(wrapped)) if train.compile else wrapped,
            optimizer=optimizer,
            loss_scale=LossScale(worker, self.micro_batch_size),
            parameters=tuple(each for each in module.parameters() if each.requires_grad),
        )

    @property
    def wrapped(self) -> nn.Module:
        """The model as the strategy has wrapped it, if one optimizer trains all of it."""
        (whole,) = self.trained
        return whole.wrapped

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers, one for each network that is trained."""
        return [each.optimizer for each in self.trained]

    def _read_first_weights(self, is_resumed: bool) -> None:
        """Fill networks that were built without storage. A checkpoint may hold all of their weights."""
        reads = not is_resumed or not self.saves_frozen_weights
        averaged = [self.average.network] if self.average else []
        for network in (self.network, *averaged):
            if allocate_parameters(network, self.worker.device) and reads:
                self.recipe.load_weights(network)

    # Checkpoints. Rank 0 saves everything, or each worker its shards of a sharded model.

    def state_beside_tensors(self) -> dict[str, Any]:
        """Return the state that is not in tensors. JSON can hold it."""
        return {
            "scaler": self.scaler.state_dict(),
            "average_updates": self.average.updates if self.average else 0,
        }

    def state(self) -> dict[str, Any]:
        """Return the state to save beside the weights, or beside the shards of a sharded model."""
        if self.strategy.is_sharded:
            return self.state_beside_tensors()
        return self.state_beside_tensors() | {
            "optimizer": {each.name: each.optimizer.state_dict() for each in self.trained}
            if self.recipe.networks
            else self.optimizers[0].state_dict(),
            "average": self.average.network.state_dict() if self.average else {},
        }

    @property
    def saves_frozen_weights(self) -> bool:
        """Whether a checkpoint holds the weights that are not trained."""
        return self.recipe.saves_frozen_weights

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of the network that a checkpoint holds. They are not copied."""
        return saved_weights(self.recipe, self.network)

    def load(self, weights: dict[str, Any], state: dict[str, Any]) -> None:
        """Restore a checkpoint that rank 0 has saved."""
        load_weights(self.recipe, self.network, weights)
        for each in self.trained:
            saved = state["optimizer"]
            each.optimizer.load_state_dict(saved if each.name is None else saved[each.name])
        if self.average:
            self.average.network.load_state_dict(state["average"])
        self.load_beside_tensors(state)

    def load_beside_tensors(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_beside_tensors` has returned."""
        self.scaler.load_state_dict(state["scaler"])
        if self.average:
            self.average.updates = state["average_updates"]

    def sync_buffers(self) -> None:
        """Copy the buffers of rank 0 to all workers, of the network and of the weight average."""
        self.strategy.sync_buffers(self.network, self.worker)
        if self.average:
            self.strategy.sync_buffers(self.average.network, self.worker)

    def delivered(self) -> nn.Module:
        """Return the network whose weights are validated and delivered: the average, if there is one."""
        return self.average.network if self.average else self.network

    def exchange_s(self) -> float:
        """Return the seconds per step of gradient exchange that the backward pass did not hide."""
        return sum(self.strategy.exchange_s(each.wrapped) for each in self.trained)

    def last_exchange_s(self) -> float:
        """Return the same for the newest step that was measured, with the wait for slower workers."""
        return sum(self.strategy.last_exchange_s(each.wrapped) for each in self.trained)

    # The loss of a worker of the group. Only DDP can continue after it: all workers have all weights.

    @property
    def can_lose_workers(self) -> bool:
        """Whether a step is either complete or without effect: not if networks are trained in turn."""
        return len(self.trained) == 1 and not self.strategy.is_sharded

    def keep_for_loss(self, files: KeptFiles) -> None:
        """Keep from now on what this worker alone has after each step, in files that outlive the worker."""
        sums, timeout_s = self.new_sums(), self.collective_timeout_s
        self.kept = KeptForLoss(files, self.worker, self.network, self.average, sums, timeout_s)

    def leave_group(self) -> None:
        """Release what belongs to the process group: DDP's buckets and the gradients in them."""
        for each in self.trained:
            each.optimizer.zero_grad(set_to_none=True)
        self.trained = [
            replace(each, wrapped=each.module, model=each.module) for each in self.trained
        ]
        # DDP's hooks stay at the weights until it is collected.
        gc.collect()

    def join_group(self) -> None:
        """Wrap the network for a new process group. All workers must call it."""
        self.network.train()
        if self.average:
            self.average.network.train()
        wrapped = [self.strategy.wrap_model(each.module, self.worker) for each in self.trained]
        self.trained = [
            replace(each, wrapped=new, model=new)
            for each, new in zip(self.trained, wrapped, strict=True)
        ]

    def arrange_buckets(self, step: int) -> None:
        """Make a pass without effect unless the next step is the first one of the run. All workers call it.

        After its first pass DDP arranges its buckets anew, and so the order in which it sums the gradients of
        more than two workers. A resumed run must sum them in the same order as if it had never ended.
        """
        if not step or self.strategy.is_sharded or self.worker.world_size <= 2:
            return
        # torch.compile would make other code for a pass of another size.
        copies = -(-self.micro_batch_size // len(self._stand_in))
        part = Batch.concat([self._stand_in] * copies).rows(0, self.micro_batch_size)
        buffers = [each.clone() for each in self.network.buffers()]
        for trained in self.trained:
            trained.loss_scale.begin(self.length.batch_size(0))
            with self._alone(trained):
                self._pass(trained, part, self.new_sums(), 0)
            self.strategy.clear_gradients(trained.wrapped, trained.optimizer)
        for buffer, before in zip(self.network.buffers(), buffers, strict=True):
            buffer.copy_(before)

    def _alone(self, trained: TrainedNetwork) -> AbstractContextManager[None]:
        """Return a context in which only this network gets gradients."""
        others = (each for each in self.trained if each is not trained)
        return without_gradients(weight for each in others for weight in each.parameters)

    # A step.

    def new_sums(self) -> LossSums:
        """Return empty sums of the loss and of the recipe's metrics."""
        return LossSums(of_batches(self.recipe.metrics), self.worker.device)

    def step(self, batch: Batch, sums: LossSums, *, epoch: int, step_in_epoch: int) -> float:
        """Make one step of each optimizer; `batch` is this worker's share of a global batch.

        Adds the losses to `sums`, and returns the learning rate of the first optimizer.
        """
        train, worker = self.train_config, self.worker
        global_samples = self.length.batch_size(step_in_epoch)
        samples = self.length.samples_until(epoch, step_in_epoch)
        # Random numbers inside the model, such as dropout masks, depend on seed and step alone.
        seed_generators(worker.device, train.seed, samples, worker.rank)

        batch = batch.to(worker.device)
        step = self.length.steps_per_epoch * epoch + step_in_epoch + 1
        for trained in self.trained:
            trained.set_rate(learning_rate(train, samples, self.length.samples, trained.name))
            self.strategy.clear_gradients(trained.wrapped, trained.optimizer)
            with self._alone(trained):
                self._passes(trained, batch, global_samples, sums, epoch, step)
                if trained.name:
                    # The others keep gathered weights for a backward pass, and have gradients in their turn.
                    self.strategy.reshard(self.network)
                self._optimizer_step(trained)
        self.scaler.update()
        if self.average:
            self.average.update(self.network)
        return self.rate(epoch, step_in_epoch)

    def rate(self, epoch: int, step_in_epoch: int) -> float:
        """Return the learning rate of a step of the first optimizer."""
        samples = self.length.samples_until(epoch, step_in_epoch)
        return learning_rate(self.train_config, samples, self.length.samples, self.trained[0].name)

    def _passes(
        self,
        trained: TrainedNetwork,
        batch: Batch,
        global_samples: int,
        sums: LossSums,
        epoch: int,
        step: int,
    ) -> None:
        """Compute the gradients of a global batch for a network, in a step that will be number `step`."""
        weight = None if trained.name else self.recipe.loss_weight(batch)
        trained.loss_scale.begin(global_samples, weight)
        parts = list(self._parts(batch, global_samples))
        worker = self.worker
        with worker.waits.counted(worker.device) if self.strategy.is_sharded else nullcontext():
            for index, part in enumerate(parts):
                is_last = index == len(parts) - 1
                alone = (
                    nullcontext() if is_last else self.strategy.without_exchange(trained.wrapped)
                )
                with alone:
                    self._pass(trained, part, sums, epoch, ends_step=step if is_last else None)

    def _pass(
        self,
        trained: TrainedNetwork,
        part: Batch,
        sums: LossSums,
        epoch: int,
        *,
        ends_step: int | None = None,
    ) -> None:
        """Run a forward and a backward pass on a part of the batch, the last one of step `ends_step`.

        With an empty part the gradients are 0, so that this worker takes part in their exchange.
        """
        is_empty = not len(part)
        part = self.recipe.augment(
            self._stand_in if is_empty else part, seed=self.train_config.seed, epoch=epoch
        )
        found = self._loss(trained, part)
        if found.sum.dim():
            raise ConfigError(
                f"Recipe.loss returned a sum of shape {tuple(found.sum.shape)}; it has to be a scalar."
            )
        if not is_empty:
            if trained.name is None:
                sums.update(found)
            else:
                sums.update_part(found, has_loss=trained is self.trained[0])
        if ends_step is not None and self.kept:
            self.kept.write(ends_step, sums)
        factor = trained.loss_scale.factor(found.weight, len(part), is_empty=is_empty)
        # The last backward pass of a step waits for the gradients of the other workers.
        with nullcontext() if ends_step is None else self.worker.activity.on(WAITING):
            self.strategy.backward(trained.wrapped, self.scaler.scale(found.sum * factor))

    def _loss(self, trained: TrainedNetwork, part: Batch) -> Loss:
        """Return the loss of a network. Only its own forward pass exchanges gradients."""
        if trained.name is None:
            return self.recipe.loss(self._forward(trained.model), part)
        models = {
            name: self._forward(trained.model if name == trained.name else child)
            for name, child in self.network.named_children()
        }
        return self.recipe.network_loss(trained.name, models, part)

    def _parts(self, batch: Batch, global_samples: int) -> Iterator[Batch]:
        """Split a batch into micro-batches: at least one, which may be empty.

        With a sharded model all workers make the same number, since each pass exchanges weights.
        """
        most = len(batch)
        if self.strategy.is_sharded:
            most = -(-global_samples // self.worker.world_size)
        for start in range(0, max(most, 1), self.micro_batch_size):
            yield batch.rows(start, start + self.micro_batch_size)

    def _forward(self, model: nn.Module) -> Forward:
        """Return the model's forward pass in the configured precision, with outputs in float32."""

        def forward(*arguments: Any, **options: Any) -> Any:
            with self.precision.autocast(self.worker.device):
                outputs = model(*arguments, **options)
            # Most models return one tensor, for which walking the tree would cost as much as a small layer.
            if isinstance(outputs, Tensor):
                return in_float32(outputs)
            return tree_map_only(Tensor, in_float32, outputs)

        return forward

    @cached_property
    def _stand_in(self) -> Batch:
        """Samples to compute with where this worker has none, so that it takes part in all exchanges."""
        seed, collate = self.train_config.seed, collate_of(self.recipe)
        return read_stand_in(self.data, seed=seed, collate=collate).to(self.worker.device)

    def _optimizer_step(self, trained: TrainedNetwork) -> None:
        """Clip the gradients of a network, and update its weights with its optimizer."""
        correction = trained.loss_scale.correction()
        if correction is not None:
            self.strategy.scale_gradients(trained.module, correction)
        if self.train_config.clip_norm:
            self.scaler.unscale_(trained.optimizer)
            self.strategy.clip(trained.module, self.train_config.clip_norm)
        self.scaler.step(trained.optimizer)

    # Validation.

    def validate(self, batches: Iterable[Batch], *, step: int = 0) -> Validation:
        """Validate on the samples of all workers, each counted once, and return the metrics over all workers.

        `step` is the number of optimizer steps that are done.
        All workers must pass the same number of batches; some of the batches may be empty.
        """
        network = self.delivered().eval()
        self.strategy.sync_buffers(network, self.worker)
        sums = EvaluationSums(self.recipe, self.worker)
        forward: Any = model_for(self.recipe, network, self._forward)
        # Not inference mode: weights that FSDP2 gathers in it cannot be used for training afterwards.
        with torch.no_grad():
            for batch in batches:
                if len(batch):
                    here = batch.to(self.worker.device)
                    sums.update(self.recipe.evaluate(forward, here), len(here))
                elif self.strategy.is_sharded or sums.is_empty:
                    sums.update(self.recipe.evaluate(forward, self._stand_in), 0)
            sums.measure(self.recipe.measure(forward, self.worker))
            # A sharded model needs all workers for each pass.
            shown = {}
            if self.strategy.is_sharded or self.worker.rank == 0:
                shown = self.recipe.demonstrate(forward, step=step)
        network.train()
        self.strategy.reshard(network)
        found = sums.compute()
        return replace(found, details=found.details | shown)

    def is_finite(self) -> bool:
        """Whether all weights on all workers are finite. All workers must call it."""
        shares = [local_shard(each).detach() for each in self.network.parameters()]
        bad = torch.stack([~share.isfinite().all() for share in shares]).sum()
        return not self.worker.sum(bad)


def allocate_parameters(network: nn.Module, device: torch.device) -> bool:
    """Allocate the parameters of a network that has none yet; return whether it had none.

    Buffers keep their values, which no file holds.
    """
    if not any(each.is_meta for each in network.parameters()):
        return False
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    network.to_empty(device=device)
    for name, buffer in network.named_buffers():
        buffer.copy_(buffers[name])
    return True


def in_float32(tensor: Tensor) -> Tensor:
    """Return a floating-point tensor in float32, and any other tensor as it is."""
    return tensor.float() if tensor.is_floating_point() else tensor


def seed_generators(device: torch.device, seed: int, samples: int, rank: int) -> None:
    """Seed the CPU's and the device's generator from seed, step and rank.

    torch.manual_seed would touch the generators of all kinds of devices.
    """
    number = ((seed * 1_000_003 + samples) * 65_537 + rank) % 2**63
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
