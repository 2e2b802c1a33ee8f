"""What a run's model says of pictures, which go the way that validation images go, or how it continues text.

python -m trainyard_trainer.tools.predict RUN IMAGE... [--top K] [--grid FILE.png] [--checkpoint NAME]
python -m trainyard_trainer.tools.predict RUN --prompt TEXT [--length N] [--temperature T] [--seed N] ...
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from trainyard_trainer.config.trainer_config import recipe_named
from trainyard_trainer.data.image_codec import UnreadableError, load
from trainyard_trainer.data.loading.on_device import ToInput
from trainyard_trainer.data.sources.text import SEPARATOR
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.language_model.generation import continued
from trainyard_trainer.recipes.saved_model import DELIVERED, Saved, read_saved
from trainyard_trainer.terminal import Bar, table_text
from trainyard_trainer.tools.command_line import Arguments, add_run, exit_code_of, open_run

SHOWN_PROBLEMS = 20

GIVEN = {
    "image_classification": "pictures: trainyard predict RUN IMAGE...",
    "language_model": "text: trainyard predict RUN --prompt TEXT",
}
"""What the models of a recipe are asked about."""

LENGTH, TEMPERATURE = 200, 0.8
"""Of a continuation, where nobody says other numbers."""


Top = tuple[tuple[str, float], ...]
"""Labels with their confidence, the likeliest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the model says of one picture."""

    file: str
    top: Top
    pixels: np.ndarray
    """(C, H, W) uint8, as the model's data has them."""


class Oracle:
    """A saved model of images on a device. Raises ConfigError for a model of text."""

    def __init__(self, saved: Saved, device: torch.device) -> None:
        require_pictures(saved)
        self.images = saved.images
        self._network = saved.build().to(device)
        self._to_input = ToInput(self.images, saved.config.image_size, device)
        self._device = device

    def __call__(self, pixels_NCHW: np.ndarray, top: int) -> list[Top]:
        """What is likeliest of each image, uint8 as the model's data has them."""
        classes = self.images.classes
        with torch.inference_mode():
            pixels = torch.from_numpy(pixels_NCHW).to(self._device)
            shares = self._network(self._to_input(pixels)).softmax(dim=1)
            best = shares.topk(min(top, len(classes)), dim=1)
        return [
            tuple(
                (classes[label], round(confidence, 6))
                for label, confidence in zip(labels, confidences, strict=True)
            )
            for labels, confidences in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]


def predict(
    saved: Saved, files: Sequence[str], *, top: int, batch_size: int, device: torch.device
) -> list[Answer]:
    """Answers in the order of the files.

    Raises ConfigError with all files that are no pictures, and for a model of text.
    """
    oracle = Oracle(saved, device)
    answers: list[Answer] = []
    problems: list[str] = []
    with Bar("pictures", len(files)) as bar:
        for names, loaded in _batches(files, oracle.images.shape, batch_size):
            bar.advance(len(names))
            problems += [each for each in loaded if isinstance(each, str)]
            if problems:  # What else is wrong is still to be found.
                continue
            pictures = np.stack(loaded)
            answers += [
                Answer(file=file, pixels=pixels, top=likeliest)
                for file, pixels, likeliest in zip(
                    names, pictures, oracle(pictures, top), strict=True
                )
            ]
    if problems:
        more = len(problems) - SHOWN_PROBLEMS
        raise ConfigError(
            f"{len(problems)} of {len(files)} files cannot be used:"
            + "".join(f"\n       {problem}" for problem in problems[:SHOWN_PROBLEMS])
            + (f"\n       and {more} more" if more > 0 else "")
        )
    return answers


def continued_text(
    saved: Saved,
    prompt: str,
    *,
    length: int,
    temperature: float,
    seed: int,
    device: torch.device,
) -> str:
    """What a language model writes behind the prompt, in at most so many bytes; the same for the same seed.

    Raises ConfigError for a model of images, and for a prompt that is none.
    """
    _require_recipe(saved, "language_model")
    given = prompt.encode()
    if SEPARATOR in given:
        raise ConfigError("--prompt has a byte 0, which ends a document. Leave it out.")
    (found,) = continued(
        saved.build().to(device),
        given,
        length=length,
        context_length=saved.config.context_length,
        temperature=temperature,
        seed=seed,
    )
    return found.decode(errors="replace")


def require_pictures(saved: Saved) -> None:
    """Raises ConfigError for a model of text."""
    _require_recipe(saved, "image_classification")


def _require_recipe(saved: Saved, recipe: str) -> None:
    found = recipe_named(saved.facts)
    if found != recipe:
        raise ConfigError(
            f"{saved.facts['run']} is a run of train.recipe = {found}, which takes {GIVEN[found]}."
        )


def _batches(
    files: Sequence[str], shape: tuple[int, int, int], batch_size: int
) -> Iterator[tuple[Sequence[str], list[np.ndarray | str]]]:
    """Names with pixels, or with what is wrong; the next batch is read while this one is computed."""

    def read(file: str) -> np.ndarray | str:
        try:
            return load(Path(file).read_bytes(), shape)
        except OSError as error:
            return f"{file}: {error.strerror}"
        except UnreadableError as reason:
            return f"{file}: {reason}"

    batches = [files[start : start + batch_size] for start in range(0, len(files), batch_size)]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        pending = threads.map(read, batches[0])
        for names, following in zip(batches, [*batches[1:], []], strict=True):
            loaded, pending = list(pending), threads.map(read, following)
            yield names, loaded


def print_answers(answers: Sequence[Answer], *, as_json: bool) -> None:
    if as_json:
        records = [
            {
                "file": answer.file,
                "label": answer.top[0][0],
                "confidence": answer.top[0][1],
                "top": [{"label": label, "confidence": sure} for label, sure in answer.top],
            }
            for answer in answers
        ]
        print(json.dumps(records, indent=2))
        return
    headings = ["file"]
    for rank in range(1, len(answers[0].top) + 1):
        suffix = f" {rank}" if rank > 1 else ""
        headings += [f"label{suffix}", f"confidence{suffix}"]
    rows = [
        (answer.file, *(cell for label, sure in answer.top for cell in (label, f"{sure:.4f}")))
        for answer in answers
    ]
    print(table_text(headings, rows))


def write_grid(answers: Sequence[Answer], file: Path) -> None:
    """Raises ConfigError if it cannot be written."""
    from trainyard_trainer.tools.grid import MOST, draw_grid  # matplotlib comes with it

    pictures = [
        (answer.pixels, f"{answer.top[0][0]}  {answer.top[0][1]:.1%}") for answer in answers
    ]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(draw_grid(pictures))
    except OSError as error:
        raise ConfigError(f"--grid = {file} cannot be written: {error.strerror}") from error
    left_out = f", the first {MOST} of {len(answers)}" if len(answers) > MOST else ""
    print(f"grid: {file}{left_out}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    parser = Arguments(prog="python -m trainyard_trainer.tools.predict")
    add_run(parser)
    parser.add_argument("images", nargs="*", help="picture files")
    parser.add_argument("--prompt", help="text to continue")
    parser.add_argument("--length", type=int, default=LENGTH, help="bytes behind it, at most")
    parser.add_argument("--temperature", type=float, default=TEMPERATURE, help="0: the likeliest")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--checkpoint", default=DELIVERED, help="delivered, last, best or a name")
    parser.add_argument("--top", type=int, default=1, help="labels per picture")
    parser.add_argument("--batch-size", type=int, default=64, help="pictures at once")
    parser.add_argument("--grid", type=Path, help="draw the pictures with their labels, too")
    parser.add_argument("--json", action="store_true")
    wanted = parser.parse_args(arguments)
    if min(wanted.top, wanted.batch_size) < 1:
        parser.error("--top and --batch-size must be at least 1")
    if (wanted.prompt is None) != bool(wanted.images):
        parser.error("give either pictures or --prompt")
    if wanted.length < 1 or not 0 <= wanted.temperature < math.inf or wanted.seed < 0:
        parser.error("--length must be at least 1, --temperature and --seed at least 0")
    folder = open_run(wanted.run, wanted.storage, wanted.endpoint)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    saved = read_saved(folder, wanted.checkpoint)
    if wanted.prompt is not None:
        text = continued_text(
            saved,
            wanted.prompt,
            length=wanted.length,
            temperature=wanted.temperature,
            seed=wanted.seed,
            device=device,
        )
        record = {"prompt": wanted.prompt, "text": text}
        print(json.dumps(record, indent=2) if wanted.json else wanted.prompt + text)
        return 0
    answers = predict(
        saved,
        wanted.images,
        top=wanted.top,
        batch_size=wanted.batch_size,
        device=device,
    )
    print_answers(answers, as_json=wanted.json)
    if wanted.grid:
        write_grid(answers, wanted.grid)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
