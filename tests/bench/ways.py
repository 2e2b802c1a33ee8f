"""Every way to train, side by side: what it needs, how fast it is, and what is left of it after a SIGKILL.

    python -m tests.bench.ways [--write | --page]

`make compare` writes docs/results/ways.json, and docs/results/ways.md from it. Each way is run as a user
would, by `trainyard train`, twice: once to its end, and once killed with all its processes after its second
epoch and then started again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.bench.fine_tuning import files_of as fine_tuning_files
from tests.bench.fine_tuning import made
from tests.bench.processes import descendants
from tests.bench.rounds import BUILD, ROOT, Options, Row, Section, main, say
from trainyard_trainer.config.trainer_config import RUN_NAME_LIMIT

TRAINYARD = str(ROOT / ".venv/bin/trainyard")
RESULTS = ROOT / "docs/results/ways.json"
PAGE = ROOT / "docs/results/ways.md"
STORAGE = BUILD / "ways"
LOOK_S = 0.25
KILL_AT = 2
"""The epoch after whose end a run is killed."""
DIGITS = 1_438
"""Images of scikit-learn's digits that are trained on; all of them, or less each fifth."""
ALL_DIGITS = 1_797
GPUS = min(2, torch.cuda.device_count())

EPOCH = re.compile(r"\b(?:epoch|round)['\"]?:? (\d+)")
"""How all of them tell of an epoch, or of a round of trees: a recipe while it is under way, else once it
is over."""
STEP = re.compile(r"\b(?:step|round) (\d+)/")
"""How recipes tell how far they are, from before their first step on."""

RESNET18 = "train.model={name: resnet18, in_channels: 1, num_classes: 10, image_size: 8}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way to train, by the run file of an example."""

    title: str
    learns: str
    """What it learns from what."""
    example: str
    settings: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    epochs: str = "train.epochs={}"
    """The setting that says how many."""
    samples: int = DIGITS
    """Of an epoch."""
    code: str | None = None
    """The file of one's own code, below examples."""
    has_own_loop: bool = False
    """Whether this code trains in a loop of its own; otherwise a recipe trains."""
    prepare: Callable[[], object] = lambda: None
    """Makes the files that the settings name, unless they are there."""
    word: str = "RayTrainWorker"
    """What stands in the command line of a worker."""
    places: tuple[str, str] = ("--gpus", f"{GPUS}") if GPUS else ("--workers", "2")
    note: str = ""
    is_for_gpus: bool = False
    """Nobody would train so on CPUs."""

    @property
    def name(self) -> str:
        words = re.sub(r"[^a-z0-9]+", "-", self.title.lower())
        return f"ways-{words}"[:RUN_NAME_LIMIT].strip("-")

    @property
    def lines(self) -> tuple[int, int]:
        """Of the run file, and of one's own code; neither comments nor empty ones."""
        return (
            _lines(ROOT / "examples" / self.example),
            0 if self.code is None else _lines(ROOT / "examples" / self.code),
        )


DIGITS_8X8 = "ResNet-18, digits 8x8"
MLP = "two linear layers, digits"


def built_in(title: str, *settings: str, flags: tuple[str, ...] = (), **more: Any) -> Way:
    return Way(
        title=title,
        learns=DIGITS_8X8,
        example="digits.yaml",
        settings=(RESNET18, *settings),
        flags=flags,
        **more,
    )


ON_CPU = (
    "Made for models that do not fit on one GPU. On CPUs it shows only that it works, not its gain."
)
UNKNOWN = "Not measured so far."
NO_CUDA = " With CUDA `make compare` takes two GPUs, or the only one: not run so far."

FSDP2 = ("train.strategy=fsdp2",)
DEEPSPEED = ("train.strategy=deepspeed",)

LARGE = (
    f"data.source={ROOT / 'docs/guides/sweeps.md'}",
    "train.model={layers: 24, heads: 8, width: 512, context_length: 16}",
    "train.schedule={name: constant}",
    "train.global_batch_size=32",
)
"""76 million parameters, with gradients and AdamW's averages 1.2 GB; and few bytes to learn."""
GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": f"{2**18}"}
"""What is freed is gone from a process, in holes of its heap, too: memory counts, not speed."""


def large(title: str, *settings: str, **more: Any) -> Way:
    return Way(
        title=f"large language model, {title}",
        learns="GPT of 24 blocks, a page of text",
        example="language_model.yaml",
        settings=(*LARGE, *settings),
        environment=GIVING_BACK,
        note="76 million parameters. glibc is told to give freed memory back at once, which takes time.",
        **more,
    )


def trees(title: str, library: str) -> Way:
    return Way(
        title=title,
        learns="trees, 569 rows of 30 numbers",
        example="gradient_boosting.yaml",
        settings=(f"train.library={library}",),
        places=("--workers", "2"),
        epochs="train.rounds={}000",
        note="An epoch is a round over all rows. There are a thousand times as many of them.",
    )


CHATS = Options(quick=True)
"""A tiny model of Transformers, and a hundred chats: the speed of a larger one is in `fine_tuning`."""


TEN_TIMES = "There are ten times as many epochs."


def own_recipe(title: str, learns: str, name: str, epochs: str, **more: Any) -> Way:
    return Way(
        title=f"own recipe, {title}",
        learns=learns,
        example=f"{name}.yaml",
        epochs=f"train.epochs={epochs}",
        code=f"recipes/{name}.py",
        **more,
    )


def fine_tuning(title: str, *settings: str) -> Way:
    model, chats = fine_tuning_files(CHATS)
    return Way(
        title=f"fine-tuning, {title}",
        learns="Llama of 1 block, 100 chats",
        example="finetune.yaml",
        settings=(
            f"data.source={chats}",
            f"train.model.path={model}",
            "train.context_length=256",
            "train.prompts=[]",
            *settings,
        ),
        epochs="train.epochs={}0",
        prepare=partial(made, CHATS),
        note=TEN_TIMES,
    )


WAYS = (
    built_in("one process", flags=("--without-ray",), word="trainer --without-ray"),
    built_in("torchrun", flags=("--torchrun",), word="trainer --without-ray"),
    built_in("Ray Train, torch loader"),
    built_in("Ray Train, Ray Data", "data.loader=ray"),
    built_in("FSDP2", *FSDP2, is_for_gpus=True),
    built_in("DeepSpeed, ZeRO 1", *DEEPSPEED, "train.deepspeed={stage: 1}", is_for_gpus=True),
    built_in("DeepSpeed, ZeRO 3", *DEEPSPEED, is_for_gpus=True),
    Way(
        title="language model",
        learns="GPT of 3 blocks, Python's modules",
        example="language_model.yaml",
    ),
    large("DDP"),
    large("FSDP2", *FSDP2, is_for_gpus=True),
    large("ZeRO 3", *DEEPSPEED, is_for_gpus=True),
    fine_tuning("LoRA"),
    fine_tuning("all weights", "train.model.adapter=null"),
    own_recipe("segmentation", "U-Net, 512 images of shapes", "segmentation", "{}"),
    own_recipe(
        "regression",
        "two linear layers, 353 rows",
        "regression",
        "{}00",
        note="There are a hundred times as many epochs.",
    ),
    own_recipe("two networks in turn", "GAN, points on a ring", "gan", "{}0", note=TEN_TIMES),
    trees("XGBoost", "xgboost"),
    trees("LightGBM", "lightgbm"),
    Way(
        title="own script, plain torch",
        learns=MLP,
        example="command.yaml",
        settings=("code=byo",),
        epochs="command=[python, single.py, '{}000']",
        samples=ALL_DIGITS,
        code="byo/single.py",
        has_own_loop=True,
        word="single.py",
        note="An epoch is a single step of milliseconds. There are a thousand times as many of them.",
    ),
    Way(
        title="own script, torchrun",
        learns=MLP,
        example="torchrun.yaml",
        epochs="command=[ddp.py, --epochs, '{}', --checkpoint, '{{storage}}/{{run}}/state.pt']",
        samples=ALL_DIGITS,
        code="byo/ddp.py",
        has_own_loop=True,
        word="ddp.py",
    ),
    Way(
        title="own script, TorchTrainer",
        learns=DIGITS_8X8,
        example="command.yaml",
        epochs="command=[python, ray_train.py, --num-workers, '{{workers}}', --epochs, '{}']",
        code="byo/ray_train.py",
        has_own_loop=True,
    ),
    Way(
        title="own script, TorchTrainer and Ray Data",
        learns=MLP,
        example="command.yaml",
        epochs="command=[python, ray_data.py, --num-workers, '{{workers}}', --epochs, '{}', --storage-path, "
        "'{{storage}}/{{run}}']",
        samples=ALL_DIGITS,
        code="byo/ray_data.py",
        has_own_loop=True,
    ),
    Way(
        title="own function",
        learns="a line of 100 points",
        example="function.yaml",
        epochs="train_loop_config={{epochs: {}, learning_rate: 0.1}}",
        samples=100,
        code="byo/loop.py",
        has_own_loop=True,
    ),
)


@dataclass(slots=True)
class Seen:
    """A run of `trainyard train`, as one sees it from outside."""

    began: float
    lines: list[tuple[float, str]] = field(default_factory=list)
    peak_bytes: int = 0
    """Of the largest worker."""

    def __str__(self) -> str:
        return "\n".join(line for _, line in self.lines)

    @property
    def epochs(self) -> dict[int, float]:
        """When each epoch was named first, in seconds."""
        found: dict[int, float] = {}
        for at, line in self.lines:
            if named := EPOCH.search(line):
                found.setdefault(int(named[1]), at)
        return found

    def first_step_s(self) -> float:
        """Of a recipe: when it tells of another step, or round, than at first, which is the one that it has
        gone on from; of own code: an epoch before the end of the first one."""
        told = [(at, int(named[1])) for at, line in self.lines if (named := STEP.search(line))]
        for at, step in told:
            if step > told[0][1]:
                return at
        times = sorted(self.epochs.values())
        return max(0.0, times[0] - self.epoch_s())

    def epoch_s(self) -> float:
        times = sorted(self.epochs.values())
        return (times[-1] - times[0]) / max(1, len(times) - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a way has shown."""

    start_s: float
    samples_per_s: float
    peak_bytes: int | None
    """Of a worker; None on a GPU of which nothing is told."""
    again_s: float
    """From the start after the SIGKILL until training went on."""
    again_epochs: int
    """That were trained a second time."""


def measure_way(way: Way, epochs: int) -> Found:
    """Raises RuntimeError if a run fails."""
    way.prepare()
    shutil.rmtree(STORAGE / way.name, ignore_errors=True)
    with started(way, epochs) as (process, seen):
        if process.wait():
            raise RuntimeError(f"{way.title} failed:\n{seen}")
    speed, peak = speed_of(way, seen), peak_of(way, seen)
    shutil.rmtree(STORAGE / way.name)
    with started(way, epochs) as (process, killed):
        while process.poll() is None and max(killed.epochs, default=0) <= KILL_AT:
            time.sleep(LOOK_S)
        if process.returncode is not None:
            raise RuntimeError(f"{way.title} ended by itself:\n{killed}")
        kill(process)
    last = max(killed.epochs)
    with started(way, epochs) as (process, again):
        if process.wait():
            raise RuntimeError(f"{way.title} did not go on:\n{again}")
    found = Found(
        start_s=seen.first_step_s(),
        samples_per_s=speed,
        peak_bytes=peak,
        again_s=again.first_step_s(),
        again_epochs=max(0, last - min(again.epochs)),
    )
    say(f"  {way.title}: {found}")
    return found


def speed_of(way: Way, seen: Seen) -> float:
    """A recipe's own account of its steps, else the time between epochs."""
    if way.has_own_loop:
        return way.samples / seen.epoch_s()
    epochs = [record for record in metrics_of(way) if record["kind"] == "epoch"]
    return statistics.median(record["samples_per_s"] for record in epochs[1:])


def peak_of(way: Way, seen: Seen) -> int | None:
    """Of the largest worker's process; on GPUs a recipe's own account of rank 0's."""
    if way.places[0] == "--workers":
        return seen.peak_bytes
    return max((record["memory_bytes"] for record in metrics_of(way)), default=None)


def metrics_of(way: Way) -> list[dict[str, Any]]:
    """Of a recipe; own code tells what it likes."""
    if way.has_own_loop:
        return []
    text = (STORAGE / way.name / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@contextmanager
def started(way: Way, epochs: int) -> Iterator[tuple[subprocess.Popen[str], Seen]]:
    """A process that is watched until it has ended."""
    settings = (*way.settings, way.epochs.format(epochs))
    command = [TRAINYARD, "train", str(ROOT / "examples" / way.example), "--name", way.name]
    command += [*way.places, "--storage", str(STORAGE), *way.flags]
    command += [word for setting in settings for word in ("--set", setting)]
    seen = Seen(began=time.monotonic())
    process = subprocess.Popen(
        command,
        env={**os.environ, **way.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            seen.lines.append((time.monotonic() - seen.began, line.rstrip("\n")))

    def look() -> None:
        while process.poll() is None:
            for each in descendants(process.pid):
                if way.word in each.command:
                    seen.peak_bytes = max(seen.peak_bytes, each.own_bytes)
            time.sleep(LOOK_S)

    threads = [threading.Thread(target=read), threading.Thread(target=look)]
    for thread in threads:
        thread.start()
    try:
        yield process, seen
    finally:
        kill(process)
        for thread in threads:
            thread.join()


def kill(process: subprocess.Popen[str]) -> None:
    """With all that it has started, at one stroke."""
    if process.poll() is None:
        for each in [*(found.pid for found in descendants(process.pid)), process.pid]:
            try:
                os.kill(each, signal.SIGKILL)
            except ProcessLookupError:
                continue
    process.wait()


def _lines(path: Path) -> int:
    kept = (line.strip() for line in path.read_text().splitlines())
    return sum(1 for line in kept if line and not line.startswith("#"))


@dataclass(kw_only=True, slots=True)
class Results:
    """What docs/results/ways.json has."""

    epochs: int
    gpus: int
    cpus: int
    ways: dict[str, list[Found]] = field(default_factory=dict)
    """By their titles, a value per round."""

    @classmethod
    def load(cls, file: Path) -> Results:
        document = json.loads(file.read_text())
        ways = document.pop("ways")
        known = {title: [Found(**each) for each in rounds] for title, rounds in ways.items()}
        return cls(**document, ways=known)

    def save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def is_like(self, other: Results) -> bool:
        """Whether both can stand in one table."""
        return replace(self, ways={}) == replace(other, ways={})


def table(results: Results) -> str:
    """A row for each way: medians of its rounds."""
    lines = [
        "| way | learns | lines: run file, own code | start | samples/s | a worker's memory "
        "| killed: again after | epochs twice |",
        "|" + "---|" * 8,
    ]
    for way in WAYS:
        run_file, code = way.lines
        rounds = results.ways.get(way.title, [])
        cells = (
            way.title,
            way.learns,
            f"{run_file}, {code or '-'}",
            _median(rounds, "start_s", "{:.0f} s"),
            _median(rounds, "samples_per_s", "{:,.0f}"),
            _median(rounds, "peak_bytes", "{:,.0f} MB", scale=1e6),
            _median(rounds, "again_s", "{:.0f} s"),
            _median(rounds, "again_epochs", "{:.0f}"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    notes: dict[str, list[str]] = {}
    for way in WAYS:
        told = {
            way.note: bool(way.note),
            ON_CPU: way.is_for_gpus and not results.gpus,
            UNKNOWN: not results.ways.get(way.title),
        }
        for note in (note for note, is_so in told.items() if is_so):
            notes.setdefault(note, []).append(way.title)
    return "\n".join(
        [*lines, "", *(f"* {'; '.join(ways)}: {note}" for note, ways in notes.items())]
    )


def _median(rounds: list[Found], what: str, form: str, scale: float = 1.0) -> str:
    values = [value for each in rounds if (value := getattr(each, what)) is not None]
    return form.format(statistics.median(values) / scale) if values else "-"


def page(results: Results) -> str:
    often = sorted({len(rounds) for rounds in results.ways.values() if rounds})
    rounds = "One round" if often == [1] else f"Medians of {' or '.join(map(str, often))} rounds"
    device = {0: "2 CPU workers", 1: "1 GPU"}.get(results.gpus, f"{results.gpus} GPUs")
    memory = "the peak of a worker's private memory, without files and shared memory"
    if results.gpus:
        memory = f"for trees {memory}; otherwise the peak on rank 0's GPU, not of your own code"
    return f"""\
# Ways to train

Every way to train, side by side. `make compare` runs each of them with `trainyard train` and writes this
page and `ways.json`. The ways differ in one line of the run file, or in the code that you bring along.

{table(results)}

* *start*: seconds from the command until training begins.
* *samples/s*: of all workers together. A recipe measures its steps. For your own code it is the time from
  one epoch to the next, with everything in it.
* *memory*: {memory}.
* *killed*: all processes are killed by SIGKILL after the second epoch, then the same command starts again. A
  recipe resumes from its last checkpoint. Your own code resumes if it looks for its checkpoint.
* One process has both cores of the machine, a worker has one.

{rounds} of {results.epochs} epochs, {device}, {results.cpus} CPUs.{"" if results.gpus else NO_CUDA}
"""


def measure(options: Options) -> list[Section]:
    if options.more.page:
        PAGE.write_text(page(Results.load(RESULTS)))
        return []
    ways = [way for way in WAYS if not options.more.only or options.more.only in way.title]
    results = Results(epochs=options.choose(8, 4), gpus=GPUS, cpus=os.cpu_count() or 1)
    file = RESULTS if options.more.write else BUILD / "ways.json"
    # It takes long: what was found under the same circumstances is kept, and --only adds to it.
    if options.more.only and file.exists() and (kept := Results.load(file)).is_like(results):
        results = kept
    results.ways |= {way.title: [] for way in ways}
    for _ in range(options.rounds_or(3)):
        for way in ways:
            results.ways[way.title].append(measure_way(way, results.epochs))
            results.save(file)
            if options.more.write:
                PAGE.write_text(page(results))
    units = {
        "start_s": "s",
        "samples_per_s": "/s",
        "peak_bytes": "B",
        "again_s": "s",
        "again_epochs": "",
    }
    rows = tuple(
        Row(what=f"{way.title}: {what}", unit=unit, values=tuple(map(float, values)))
        for way in ways
        for what, unit in units.items()
        if None not in (values := [getattr(each, what) for each in results.ways[way.title]])
    )
    return [Section(title="Ways to train", rows=rows)]


if __name__ == "__main__":
    main(
        measure,
        write={
            "action": "store_true",
            "help": "write docs/results/ways.json and docs/results/ways.md",
        },
        page={
            "action": "store_true",
            "help": "write docs/results/ways.md anew, and measure nothing",
        },
        only={"default": "", "help": "ways with this in their title, beside those found before"},
    )
