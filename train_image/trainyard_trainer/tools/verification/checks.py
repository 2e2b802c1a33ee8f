"""The checks of a recipe: each one compares a few short trials and tells what it has seen, in numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import torch

from trainyard_trainer.checkpointing.checkpoint import Checkpoints
from trainyard_trainer.errors import TrainerError
from trainyard_trainer.recipes.registry import recipe_of
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.tools.verification.trials import Bench, Observed, Trial, batch_norms

TOLERANCE = 1e-4
"""The largest relative difference of losses and gradients that are added in another order."""

Result = Literal["ok", "FAILED", "warning", "not comparable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """What a check has found."""

    check: str
    result: Result
    numbers: str
    """What was measured, in a few words."""
    details: tuple[str, ...] = ()
    """What is wrong, and the remedy, a line each."""


Check = Callable[["Verification"], CheckResult]


@dataclass(frozen=True)  # without slots, for cached_property
class Verification:
    """The checks of one recipe. Trials that several checks need are run once."""

    bench: Bench

    def results(self) -> Iterator[CheckResult]:
        """Run all checks; yield the result of each as soon as it is known."""
        for title, check in CHECKS.items():
            try:
                yield check(self)
            except TrainerError as error:
                first, *more = str(error).splitlines()
                yield CheckResult(
                    check=title,
                    result="FAILED",
                    numbers="a trial ended with an error",
                    details=(first, *(line.strip() for line in more)),
                )

    @property
    def steps(self) -> int:
        return self.bench.length.steps_per_epoch

    @property
    def middle(self) -> int:
        """The number of steps after which trials save a checkpoint."""
        return max(1, self.steps // 2)

    def trial(
        self,
        workers: int = 1,
        *,
        strategy: str = "ddp",
        micro_batch_size: int | None = None,
        has_dropout: bool = True,
    ) -> Observed:
        """Run a trial without a kill or a resume."""
        return self.bench.run(
            Trial(
                workers=workers,
                steps=self.steps,
                strategy=strategy,
                micro_batch_size=micro_batch_size,
                has_dropout=has_dropout,
            )
        )

    @cached_property
    def undisturbed(self) -> Observed:
        """The trial of one worker with which others are compared; it saves a checkpoint on its way."""
        return self.bench.run(Trial(steps=self.steps, save_after=self.middle))

    @cached_property
    def repeated(self) -> Observed:
        """The same training once more."""
        return self.trial()

    @property
    def is_repeatable(self) -> bool:
        return self.undisturbed.digests == self.repeated.digests

    @cached_property
    def plain(self) -> Observed:
        """The same without dropout, whose random numbers differ between workers and passes."""
        return self.trial(has_dropout=False)

    @cached_property
    def norms(self) -> list[str]:
        """The layers of batch norm."""
        recipe = recipe_of(self.bench.config, self.bench.data.info)
        with torch.device("meta"):
            return batch_norms(recipe.build_model())

    @property
    def takes_one_sample(self) -> bool:
        return recipe_of(self.bench.config, self.bench.data.info).takes_one_sample()

    @property
    def checkpoint(self) -> str:
        """The checkpoint of the undisturbed trial."""
        return self.undisturbed.saved[0]


# Exact repetition.


def same_bits(all_: Verification) -> CheckResult:
    one, other = all_.undisturbed, all_.repeated
    step = first_difference(one.digests, other.digests)
    return CheckResult(
        check="same bits twice",
        result="ok" if step is None else "FAILED",
        numbers=f"SHA-256 of all weights after {all_.steps} steps: {one.digests[-1][:12]}",
        details=()
        if step is None
        else (
            f"two trainings from the same seed differ after step {step + 1}: the loss is "
            f"{one.losses[step]:.9g} and {other.losses[step]:.9g}",
            "Random numbers have to follow from seed and step: use torch's functions in the model, and "
            "random_numbers(seed, epoch, ids, ...) in augment.",
        ),
    )


def same_after_kill(all_: Verification) -> CheckResult:
    title, middle = "same bits after a kill", all_.middle
    if not all_.is_repeatable:
        return not_repeatable(title)
    killed_after = min(middle + 1, all_.steps)
    killed = all_.bench.run(Trial(steps=all_.steps, save_after=middle, kill_after=killed_after))
    (checkpoint,) = killed.saved
    resumed = all_.bench.run(Trial(steps=all_.steps, start=checkpoint))
    wanted = all_.undisturbed.digests[middle:]
    step = first_difference(wanted, resumed.digests)
    return CheckResult(
        check=title,
        result="ok" if step is None else "FAILED",
        numbers=f"SIGKILL after step {killed_after} of {all_.steps}, resumed from step {middle}",
        details=()
        if step is None
        else (
            f"the resumed training differs after step {middle + step + 1}: the loss is "
            f"{all_.undisturbed.losses[middle + step]:.9g} without the kill, and "
            f"{resumed.losses[step]:.9g} with it",
            "Something that training changes is in no checkpoint: see `saved and loaded`.",
        ),
    )


def saved_and_loaded(all_: Verification) -> CheckResult:
    again = all_.bench.run(Trial(steps=all_.middle, start=all_.checkpoint, save_after=all_.middle))
    hashes = [hashes_of(all_.bench, name) for name in (all_.checkpoint, again.saved[0])]
    files = [name for name in hashes[0] if hashes[0][name] != hashes[1].get(name)]
    hidden = all_.undisturbed.hidden
    details = [f"{name} differs after it was loaded and saved again" for name in files]
    details += [f"training changes {change}, and it is in no checkpoint" for change in hidden]
    if details:
        details.append(
            "Keep what training changes in parameters, or in buffers with persistent=True: "
            "register_buffer(name, tensor)."
        )
    return CheckResult(
        check="saved and loaded",
        result="FAILED" if details else "ok",
        numbers=f"{len(hashes[0])} files equal after save, load and save; {len(hidden)} hidden values",
        details=tuple(details),
    )


def not_repeatable(title: str) -> CheckResult:
    return CheckResult(
        check=title,
        result="not comparable",
        numbers="two equal trainings differ already: see `same bits twice`",
    )


# Another division of the work.


def two_workers(all_: Verification) -> CheckResult:
    return compared(
        all_, "1 and 2 workers", {"2 workers": partial(all_.trial, 2, has_dropout=False)}
    )


def micro_batches(all_: Verification) -> CheckResult:
    size = all_.bench.batch_size
    sizes = [each for each in (1, size // 2) if size % each == 0 and each < size]
    if not all_.takes_one_sample:
        sizes = [each for each in sizes if each > 1]
    trials = {
        f"micro_batch_size {each}": partial(all_.trial, micro_batch_size=each, has_dropout=False)
        for each in sizes
    }
    return compared(all_, "micro-batches", trials)


def fsdp2_and_ddp(all_: Verification) -> CheckResult:
    title = "FSDP2 and DDP"
    if not all_.is_repeatable:
        return not_repeatable(title)
    ddp = all_.trial(2, has_dropout=False)
    fsdp2 = all_.trial(2, strategy="fsdp2", has_dropout=False)
    loss, gradient = difference(ddp, fsdp2)
    is_ok = is_small(loss, gradient)
    return CheckResult(
        check=title,
        result="ok" if is_ok else "FAILED",
        numbers=shown(loss, gradient),
        details=()
        if is_ok
        else (
            "with FSDP2 each worker holds a part of each parameter: use parameters in forward only, and "
            "not by their values in the recipe",
        ),
    )


def resume_with_two(all_: Verification) -> CheckResult:
    resumed = all_.bench.run(Trial(workers=2, steps=all_.steps, start=all_.checkpoint))
    seen = [each for step in all_.undisturbed.ids[: all_.middle] for each in step]
    seen += [each for step in resumed.ids for each in step]
    twice = len(seen) - len({*seen})
    lost = all_.bench.length.num_samples - len({*seen})
    is_ok = not twice and not lost
    return CheckResult(
        check="resume with 2 workers",
        result="ok" if is_ok else "FAILED",
        numbers=f"of {all_.bench.length.num_samples} samples {lost} lost, {twice} used twice",
    )


def compared(
    all_: Verification, title: str, trials: Mapping[str, Callable[[], Observed]]
) -> CheckResult:
    """Compare trials with the plain one: the loss of all steps, and the gradients of the first."""
    if not all_.is_repeatable:
        return not_repeatable(title)
    if all_.norms:
        return CheckResult(
            check=title,
            result="not comparable",
            numbers=f"{len(all_.norms)} layers of batch norm, such as {all_.norms[0]}",
            details=(
                "batch norm uses the mean of each worker's pass, so the division of a batch changes the "
                "result",
            ),
        )
    if not trials:
        return CheckResult(
            check=title,
            result="not comparable",
            numbers=f"a batch of {all_.bench.batch_size} cannot be divided for this model",
        )
    found, details = [], []
    for name, run in trials.items():
        loss, gradient = difference(all_.plain, run())
        found.append((loss, gradient))
        if not is_small(loss, gradient):
            details.append(f"{name}: {shown(loss, gradient)}, and {TOLERANCE:g} is the tolerance")
    if details:
        details.append(
            "Loss.sum has to be the sum over the samples and Loss.weight their number (or that of tokens or "
            "pixels). The loss of a sample must not depend on the others of its pass. Random numbers in loss "
            "differ between workers: use layers such as nn.Dropout, or random_numbers in augment."
        )
    return CheckResult(
        check=title,
        result="FAILED" if details else "ok",
        numbers=f"{', '.join(trials)}: {shown(*map(worst, zip(*found, strict=True)))}",
        details=tuple(details),
    )


# Inside a step.


def waiting(all_: Verification) -> CheckResult:
    share = all_.undisturbed.wait_share
    return CheckResult(
        check="waiting for data",
        result="ok",
        numbers=f"{share:.0%} of the time, read in the process of the worker",
    )


def inside_a_step(all_: Verification) -> CheckResult:
    observed = all_.bench.run(Trial(steps=min(2, all_.steps), is_probed=True))
    wrong = [each for each in observed.findings if each.kind in ("random", "clock")]
    waits = [each for each in observed.findings if each.kind == "wait"]
    by_worker = [each for each in observed.findings if each.kind == "worker"]
    details = [f"{each.call} is called in {each.place}" for each in (*wrong, *by_worker, *waits)]
    if wrong:
        details.append(
            "A step may use the batch, the seed and torch's random functions alone: they are seeded for each "
            "step."
        )
    if by_worker:
        details.append(
            "Its numbers are repeatable, and others on each worker: use random_numbers in augment."
        )
    if waits:
        details.append("Where the model is on a GPU, the host waits for it there in each step.")
    return CheckResult(
        check="inside a step",
        result="FAILED" if wrong else "warning" if details else "ok",
        numbers=f"{len(wrong)} calls of clocks or global generators, {len(waits)} that wait for a GPU",
        details=tuple(details),
    )


CHECKS: dict[str, Check] = {
    "same bits twice": same_bits,
    "same bits after a kill": same_after_kill,
    "saved and loaded": saved_and_loaded,
    "1 and 2 workers": two_workers,
    "micro-batches": micro_batches,
    "FSDP2 and DDP": fsdp2_and_ddp,
    "resume with 2 workers": resume_with_two,
    "waiting for data": waiting,
    "inside a step": inside_a_step,
}
"""The checks by their names, in the order of the table."""


# Comparisons.


def first_difference(one: list[str], other: list[str]) -> int | None:
    """Return the index of the first entry that differs; None if all are equal."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((index for index, (a, b) in pairs if a != b), None)


def difference(one: Observed, other: Observed) -> tuple[float, float]:
    """Return the largest relative differences of the losses of all steps, and of the first gradients."""
    losses = zip(one.losses, other.losses, strict=True)
    loss = worst(abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in losses)
    norm = sum(float(each.square().sum()) for each in one.gradients.values()) ** 0.5
    apart = sum(
        float((each - other.gradients[name]).square().sum()) for name, each in one.gradients.items()
    )
    return loss, apart**0.5 / max(norm, 1e-12)


def is_small(loss: float, gradient: float) -> bool:
    """Return whether both differences are within the tolerance; one that is not a number is not."""
    return loss <= TOLERANCE and gradient <= TOLERANCE


def worst(differences: Iterable[float]) -> float:
    """Return the largest difference, or one that is not a number."""
    return max(differences, key=lambda each: math.inf if math.isnan(each) else each)


def shown(loss: float, gradient: float) -> str:
    return f"loss differs by {loss:.1e}, gradients by {gradient:.1e}"


def hashes_of(bench: Bench, name: str) -> dict[str, str]:
    """Return the SHA-256 of each file of a checkpoint."""
    folder = RunFolder.open(bench.folder, bench.config.name)
    files = Checkpoints(folder).read_manifest(name).files
    return {file: facts["sha256"] for file, facts in files.items()}
