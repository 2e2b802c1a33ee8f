"""Estimate the memory that a worker of `causal_lm` needs, from the model's sizes and the run's settings.

The estimate adds up what the computation keeps: weights, gradients, optimizer state, and the tensors that the
backward pass needs. It leaves out what PyTorch's allocator cannot use (fragments), and CUDA itself; see
`RESERVE_BYTES`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from trainyard_trainer.config.memory.model_shape import ModelShape, Projection, UnknownShape
from trainyard_trainer.config.training.batch_share import share_batch
from trainyard_trainer.config.training.models import Lora
from trainyard_trainer.config.training.optimizers import AdamW, Sgd
from trainyard_trainer.config.training.strategies import DeepSpeedConfig, Fsdp2Config
from trainyard_trainer.config.training.train import CausalLm

FULL, HALF = 4, 2
"""The size of a number in float32, and in bf16 or fp16."""

RESERVE_BYTES = 2**30
"""Memory of a GPU that a run cannot use: CUDA's context, the kernels and their work space, NCCL."""

BUCKET_PARAMETERS = 2**23
"""The number of parameters that DeepSpeed exchanges at once, as `parallel.zero` sets it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerMemory:
    """The largest amount of memory that a worker needs at once in a step, in bytes."""

    parameters: int
    """The weights, with those that a sharded model gathers for a block."""
    gradients: int
    """The gradients of the trained weights."""
    optimizer: int
    """The state of the optimizer."""
    activations: int
    """The tensors that the backward pass needs, and what is in use only for a moment."""

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.parameters + self.gradients + self.optimizer + self.activations


class Numbers(NamedTuple):
    """The sizes of the numbers that a pass computes with."""

    compute: int
    """Products of matrices."""
    stream: int
    """What goes from block to block, and what the norms return."""
    stored: int
    """The weights."""
    is_autocast: bool
    """Whether operands of products are copied into the format of the products."""


def worker_memory(
    shape: ModelShape, train: CausalLm, *, num_workers: int, use_gpu: bool
) -> WorkerMemory:
    """Estimate the memory of a worker. Raises UnknownShape for settings whose memory is not known."""
    share = share_batch(train, num_workers)
    step = _Pass(shape, train, rows=share.micro_batch_size, use_gpu=use_gpu)
    match train.strategy:
        case "ddp":
            state = _replicated(step, num_workers, accumulates=share.accumulation > 1)
        case "fsdp2":
            state = _sharded(step, num_workers, accumulates=share.accumulation > 1)
        case "deepspeed":
            state = _partitioned(step, num_workers)
    moments = (
        # In the loss, behind the last block.
        state.before + step.kept() + step.cached_weight_copies() + step.head_forward(),
        # In the backward pass of the last block.
        state.before + step.kept() + step.block_backward() + step.head_update() + state.pending,
        # In that of the first block.
        max(state.before, state.after - FULL * step.trained_first)
        + step.once()
        + step.first_block_backward()
        + state.pending,
        # Before the optimizer's step.
        state.after + state.last,
    )
    gradients = max(state.before, state.after)
    return WorkerMemory(
        parameters=state.parameters,
        gradients=gradients,
        optimizer=state.optimizer,
        activations=max(0, max(moments) - gradients),
    )


class _State(NamedTuple):
    """What a strategy keeps on each worker, in bytes."""

    parameters: int
    optimizer: int
    before: int
    """Gradients while the last forward pass of a step is computed."""
    after: int
    """Gradients at the end of a step."""
    pending: int = 0
    """Gradients of a block that are not yet divided among the workers."""
    last: int = 0
    """What the exchange of the last gradients needs, when all activations are free."""


def _replicated(step: _Pass, num_workers: int, *, accumulates: bool) -> _State:
    """Return what each worker has with DDP: all of it."""
    gradients = FULL * step.trained
    return _State(
        parameters=step.weights() + step.average(),
        optimizer=_state_numbers(step.train) * gradients,
        # The gradients of DDP are in its buckets, which are always there.
        before=gradients if accumulates or num_workers > 1 else 0,
        after=gradients,
    )


def _sharded(step: _Pass, num_workers: int, *, accumulates: bool) -> _State:
    """Return what each worker has with FSDP2: its shards, and the whole weights of two blocks.

    FSDP2 gathers the weights of the next block while a block computes. The weights outside of blocks are
    gathered for the whole pass.
    """
    options = step.train.fsdp2 or Fsdp2Config()
    layers = 2 if options.reshard_after_forward else step.shape.layers
    gathered = step.gathered(layers * step.shape.block + step.shape.outside)
    gathered += layers * FULL * step.trained_block if step.lora else 0
    shards = (step.weights() + step.average()) // num_workers
    gradients = FULL * step.trained // num_workers
    is_off = options.cpu_offload
    return _State(
        parameters=gathered + (0 if is_off else shards),
        optimizer=0 if is_off else _state_numbers(step.train) * gradients,
        before=gradients if accumulates and not is_off else 0,
        after=0 if is_off else gradients,
        # The gradients, and the buffer from which they are summed.
        pending=2 * FULL * step.trained_block,
        last=2 * FULL * step.trained_outside,
    )


def _partitioned(step: _Pass, num_workers: int) -> _State:
    """Return what each worker has with DeepSpeed: a share of what its stage divides.

    DeepSpeed keeps a second copy of the trained weights that each worker updates.
    """
    options = step.train.deepspeed or DeepSpeedConfig()
    gradients, bucket = FULL * step.trained, FULL * BUCKET_PARAMETERS
    share = gradients // num_workers
    weights = step.weights()
    if options.stage == 3:
        gathered = step.gathered(max(2 * BUCKET_PARAMETERS, step.shape.table))
        weights = gathered + (0 if options.offload == "all" else weights // num_workers)
    kept = gradients if options.stage == 1 else min(share + 2 * bucket, gradients)
    return _State(
        parameters=weights,
        optimizer=0 if options.offload != "none" else (_state_numbers(step.train) + 1) * share,
        before=kept,
        after=kept,
    )


def trained_parameters(shape: ModelShape, lora: Lora | None) -> int:
    """Return the number of trained parameters: all of them, or those of the adapter."""
    if lora is None:
        return shape.parameters
    targets = adapter_targets(shape, lora)
    return shape.layers * lora.rank * sum(each.inputs + each.outputs for each in targets)


def adapter_targets(shape: ModelShape, lora: Lora) -> tuple[Projection, ...]:
    """Return the layers of a block that have an adapter. Raises UnknownShape for other targets."""
    if lora.dora:
        raise UnknownShape("the memory of DoRA is not known")
    if isinstance(lora.targets, str):
        return shape.projections
    found: list[Projection] = []
    for target in lora.targets:
        ends = [each for each in shape.projections if f".{each.name}".endswith(f".{target}")]
        if not ends:
            raise UnknownShape(
                f"train.model.adapter.targets has {target}, which is not in each block"
            )
        found += ends
    return tuple(dict.fromkeys(found))


def _state_numbers(train: CausalLm) -> int:
    """Return how many numbers the optimizer keeps for each trained weight."""
    match train.optimizer:
        case AdamW():
            return 2
        case Sgd(momentum=momentum):
            return 1 if momentum else 0


def _numbers(shape: ModelShape, train: CausalLm, *, use_gpu: bool) -> Numbers:
    name = train.precision
    is_autocast = name in ("bf16", "fp16") or (name == "auto" and use_gpu)
    stored = shape.weight_bytes if train.model.adapter else FULL
    fsdp2 = train.fsdp2
    if train.strategy == "fsdp2" and fsdp2 is not None and fsdp2.param_dtype == "bf16":
        stored = HALF
    return Numbers(
        compute=HALF if is_autocast else stored,
        stream=stored,
        stored=stored,
        is_autocast=is_autocast,
    )


class _Pass:
    """The memory of a forward and backward pass over a micro-batch, beside weights and gradients."""

    def __init__(self, shape: ModelShape, train: CausalLm, *, rows: int, use_gpu: bool) -> None:
        self.shape, self.train, self.use_gpu = shape, train, use_gpu
        self.numbers = _numbers(shape, train, use_gpu=use_gpu)
        self.rows, self.tokens = rows, rows * train.context_length
        self.lora = train.model.adapter
        self.is_full = self.lora is None
        self.targets = adapter_targets(shape, self.lora) if self.lora else ()
        self.is_packed = train.packing or (
            shape.window is not None and train.context_length > shape.window
        )

    # Weights.

    @property
    def trained(self) -> int:
        """The number of trained parameters."""
        return trained_parameters(self.shape, self.lora)

    @property
    def trained_block(self) -> int:
        """The number of trained parameters of a block."""
        return self.trained // self.shape.layers if self.lora else self.shape.block

    @property
    def trained_outside(self) -> int:
        """The number of trained parameters outside of the blocks."""
        return 0 if self.lora else self.shape.outside

    @property
    def trained_first(self) -> int:
        """The number of trained parameters whose gradients follow after the first block has begun."""
        table = 0 if self.lora or self.shape.is_tied else self.shape.table
        return self.trained_block + table

    def weights(self) -> int:
        """Return the memory of all weights: float32 if they are trained, else as they are stored."""
        frozen = self.shape.weight_bytes * self.shape.parameters if self.lora else 0
        return FULL * self.trained + frozen

    def average(self) -> int:
        """Return the memory of the weights' moving average."""
        return 0 if self.train.ema_decay is None else self.weights()

    def gathered(self, parameters: int) -> int:
        """Return the memory of the model's weights that a worker gathers."""
        return self.numbers.stored * parameters

    # What a pass keeps.

    def kept(self) -> int:
        """Return the memory that the forward pass leaves for the backward pass."""
        shape = self.shape
        inputs = self.numbers.stream * shape.width * self.tokens
        blocks = shape.layers * (inputs if self.is_checkpointed else self.block())
        return blocks + self.once()

    @property
    def is_checkpointed(self) -> bool:
        """Whether only the inputs of blocks are kept."""
        return self.train.model.gradient_checkpointing

    def once(self) -> int:
        """Return the memory of what exists once: the input, masks, positions, and the last norm."""
        shape, numbers = self.shape, self.numbers
        norm = self._norm() + numbers.stream * shape.width
        positions = 0 if shape.has_layer_norm else 2 * shape.head_size * FULL
        return self.tokens * (norm + positions + 8 * 4) + self._mask()

    def _mask(self) -> int:
        """Return the memory of the mask that all blocks share."""
        if not self.is_packed or self._attention in ("flash", "flex"):
            return 0
        return self.rows * self.train.context_length**2

    def block(self) -> int:
        """Return the memory that a block keeps for its backward pass."""
        per_token = self._norms() + self._attention_tensors() + self._feed_forward()
        per_token += self._operands() + self._dropout_masks()
        return self.tokens * per_token + self._scores() + self._weight_copies()

    def _norm(self) -> int:
        """Return the bytes per token that a norm of the whole width keeps: its input, and what it scales."""
        width = self.shape.width
        # RMSNorm computes in float32; its scaled output is kept for the gradient of its weights.
        scaled = 0 if self.shape.has_layer_norm or not self.is_full else self.numbers.stream * width
        entered = self.numbers.stream if self.shape.has_layer_norm else FULL
        return entered * width + scaled + 2 * FULL

    def _norms(self) -> int:
        shape = self.shape
        found = 2 * self._norm()
        if shape.has_head_norms:
            size = (shape.heads + shape.key_value_heads) * shape.head_size
            found += size * (FULL + (self.numbers.compute if self.is_full else 0))
        return found

    @property
    def _attention(self) -> str:
        name = self.train.model.attention
        return "sdpa" if name == "auto" else name

    def _attention_tensors(self) -> int:
        """Return the bytes per token of queries, keys, values and the output of the attention."""
        shape, compute = self.shape, self.numbers.compute
        queries = shape.heads * shape.head_size
        shares_keys = self._attention in ("flash", "flex") or not self.is_packed
        keys = (shape.key_value_heads if shares_keys else shape.heads) * shape.head_size
        return compute * (2 * queries + 2 * keys) + FULL * shape.heads

    def _feed_forward(self) -> int:
        """Return the bytes per token between the layers of the feed-forward network."""
        inner, compute = self.shape.inner_size, self.numbers.compute
        if not self.shape.has_layer_norm:
            return 3 * inner * compute
        if self.use_gpu and self.numbers.is_autocast:
            # On GPUs, autocast computes the power in GELU in float32.
            return inner * (2 * compute + 3 * FULL)
        return 4 * inner * compute

    def _operands(self) -> int:
        """Return the bytes per token of the inputs of the linear layers, and inside of adapters."""
        if not self.is_full:
            return sum(self._adapter_operands())
        numbers, copies = self.numbers, 0
        seen: set[str] = set()
        for each in self.shape.projections:
            # The output of a norm is kept once if its layers compute in its format.
            before = numbers.stream if each.reads in ("block", "middle") else numbers.compute
            is_copied = numbers.is_autocast and before != numbers.compute
            if each.reads == "attention" or (each.reads in seen and not is_copied):
                continue
            seen.add(each.reads)
            copies += each.inputs * numbers.compute
        return copies

    def _adapter_operands(self) -> Iterator[int]:
        """Yield the bytes per token that each adapter of a block keeps."""
        lora, numbers = self.lora, self.numbers
        assert lora is not None
        compute = HALF if numbers.is_autocast else FULL
        seen: set[str] = set()
        for each in self.targets:
            before = numbers.stream if each.reads in ("block", "middle") else numbers.compute
            # PEFT converts the input to float32, the format of the adapter.
            is_own = bool(lora.dropout) or compute != before or numbers.is_autocast
            if is_own or (each.reads not in seen and each.reads != "attention"):
                yield each.inputs * compute
            seen.add(each.reads)
            yield lora.rank * compute
            if lora.dropout:
                yield each.inputs * self._mask_bytes(FULL)

    def _mask_bytes(self, number: int) -> int:
        """Return the size of a number of a dropout's mask: a byte on GPUs, that of its input on CPUs."""
        return 1 if self.use_gpu else number

    def _dropout_masks(self) -> int:
        if not self.shape.residual_dropout:
            return 0
        return 2 * self.shape.width * self._mask_bytes(self.numbers.compute)

    def _scores(self) -> int:
        """Return the memory of a block's attention that grows with the square of the context length."""
        pairs = self.rows * self.train.context_length**2
        heads, numbers = self.shape.heads, self.numbers
        if self._attention in ("flash", "flex"):
            return 0
        if self._attention == "eager":
            copied = numbers.compute if numbers.compute != FULL else 0
            dropped = FULL + self._mask_bytes(FULL) if self.shape.attention_dropout else 0
            return pairs * heads * (FULL + copied + dropped)
        if self.shape.attention_dropout and not self.use_gpu:
            # The kernel for CPUs has no dropout.
            return pairs * heads * 3 * FULL
        return pairs * numbers.compute if self.is_packed else 0

    def _weight_copies(self, *, is_cache: bool = False) -> int:
        """Return the memory of a block's weights that autocast has copied into the format of the products.

        `is_cache` counts those alone that it caches: the trained ones.
        """
        numbers = self.numbers
        if not numbers.is_autocast:
            return 0
        copied = self.trained_block if self.lora else 0
        if numbers.stored != numbers.compute and (self.is_full or not is_cache):
            copied += sum(each.weights for each in self.shape.projections)
        return copied * numbers.compute

    # What is in use for a moment.

    def cached_weight_copies(self) -> int:
        """Return the memory of copied weights that autocast keeps until the end of the forward pass.

        It keeps copies of trained weights alone. Without checkpointing, `kept` counts them.
        """
        if not self.is_checkpointed:
            return 0
        return self.shape.layers * self._weight_copies(is_cache=True)

    def head_forward(self) -> int:
        """Return the memory of the output layer and the loss while they are computed."""
        shape, numbers, tokens = self.shape, self.numbers, self.tokens
        is_halved = self.use_gpu or not numbers.is_autocast
        chunk = _chunk(tokens, shape.width, shape.vocab_size, is_halved=is_halved)
        half = numbers.compute == HALF
        found = tokens * shape.width * numbers.compute  # the gradient of the input
        if half and numbers.stored != HALF:
            found += (
                shape.table * HALF + tokens * shape.width * HALF
            )  # weights and input, converted
        if half and not self.use_gpu:
            found += shape.table * FULL + tokens * shape.width * (FULL - HALF)
            # The gradient is added up in float32, with two more tensors of its size.
            found += 3 * shape.table * FULL if self.is_full else 0
        scores = chunk * shape.vocab_size * (FULL + (HALF if half and self.use_gpu else 0))
        return found + scores + self.head_gradient()

    def head_gradient(self) -> int:
        """Return the size of the gradient of the output layer, which the forward pass makes."""
        return self.shape.table * self.numbers.compute if self.is_full else 0

    def head_update(self) -> int:
        """Return the size of that gradient, and of its copy in float32 that becomes the weight's gradient."""
        return self.head_gradient() + (self.shape.table * FULL if self.is_full else 0)

    def block_backward(self) -> int:
        """Return what the backward pass of a block has in use beside what the block has kept."""
        shape, numbers = self.shape, self.numbers
        per_token = 2 * shape.inner_size * numbers.compute + shape.width * numbers.stream
        again = self.block() if self.is_checkpointed else 0
        return self.tokens * per_token + again

    def first_block_backward(self) -> int:
        """Return what the backward pass of the first block needs, when the others have finished."""
        return self.block_backward() + (0 if self.is_checkpointed else self.block())


def _chunk(tokens: int, width: int, vocab_size: int, *, is_halved: bool) -> int:
    """Return for how many tokens at once PyTorch's linear_cross_entropy computes the scores."""
    target = -(-tokens // -(-vocab_size // width))
    size = 1 << (target - 1).bit_length()
    return max(1, min(size // 2 if is_halved else size, tokens))
