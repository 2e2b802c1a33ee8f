"""The share of a global batch that one worker computes, and the micro-batches that it is divided into."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard_trainer.config.training.train import Train


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShare:
    """The part of each global batch that one worker computes."""

    samples: int
    """The number of samples per optimizer step."""
    micro_batch_size: int
    """The number of samples per forward and backward pass."""

    @property
    def accumulation(self) -> int:
        """The number of forward and backward passes per optimizer step."""
        return self.samples // self.micro_batch_size


def share_batch(train: Train, num_workers: int) -> BatchShare:
    """Divide the global batch among workers and passes: 64 over 2 workers by 16 -> 32 samples in 2 passes.

    Raises ValueError with the nearest valid numbers: a rounded batch would change the trained weights.
    """
    share, rest = divmod(train.global_batch_size, num_workers)
    if rest:
        nearest = [size * num_workers for size in (share, share + 1) if size > 0]
        raise ValueError(
            f"train.global_batch_size = {train.global_batch_size} cannot be shared equally by "
            f"{num_workers} workers: {rest} left over. Use {' or '.join(map(str, nearest))}, "
            f"or a number of workers that divides {train.global_batch_size}."
        )
    micro = train.micro_batch_size or share
    if share % micro:
        smaller = max(size for size in range(1, min(micro, share) + 1) if share % size == 0)
        raise ValueError(
            f"train.micro_batch_size = {micro} does not divide the {share} samples that each of "
            f"{num_workers} workers has of train.global_batch_size = {train.global_batch_size}. "
            f"Use {smaller}, or another divisor of {share}."
        )
    return BatchShare(samples=share, micro_batch_size=micro)
