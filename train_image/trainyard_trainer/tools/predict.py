"""The command line of predictions: labels of images, columns of a user's recipe, or texts.

python -m trainyard_trainer.tools.predict RUN IMAGE... [--top K] [--grid FILE.png] [--checkpoint NAME]
python -m trainyard_trainer.tools.predict RUN PROMPTS --out FILE [--length N] [--temperature T] [--seed N]
python -m trainyard_trainer.tools.predict RUN --data PATH --out PATH [--top K] [--checkpoint NAME]
python -m trainyard_trainer.tools.predict RUN --data PATH --trust-code [--out FILE] [--checkpoint NAME]
python -m trainyard_trainer.tools.predict RUN --split train|valid [--out FILE] [--trust-code]
python -m trainyard_trainer.tools.predict RUN --prompt TEXT [--length N] [--temperature T] [--seed N]
python -m trainyard_trainer.tools.predict RUN --chat [--length N] [--temperature T] [--seed N]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trainyard_trainer.config.tools.prediction_tool import PREDICT
from trainyard_trainer.config.training.recipes import CAUSAL_LM
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.language_model.codec import codec_of
from trainyard_trainer.recipes.language_model.generation import continued
from trainyard_trainer.recipes.language_model.recipe import Language
from trainyard_trainer.recipes.saved_model import Saved, read_saved
from trainyard_trainer.run_files.programs.standard_streams import run_with_safe_streams
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.terminal import table_text
from trainyard_trainer.tools.command_line import exit_code_of, open_run, parse
from trainyard_trainer.tools.prediction.chat import Assistant, chat_on_terminal, with_base_model
from trainyard_trainer.tools.prediction.classifier import (
    LabelledFile,
    classify_files,
    require_recipe,
)


def main(arguments: list[str] | None = None) -> int:
    _, wanted = parse(arguments, PREDICT)
    if wanted.split is not None or (wanted.data is not None and wanted.trust_code):
        _predict_own(wanted)
    elif wanted.data is not None:
        # It imports Ray, which the others do not need.
        from trainyard_trainer.tools.prediction.predict_data import predict_data

        predict_data(wanted)
    elif wanted.files and wanted.out:
        # It imports Ray, too.
        from trainyard_trainer.tools.prediction.predict_prompts import predict_prompts

        predict_prompts(wanted)
    elif wanted.chat:
        chat_on_terminal(_assistant(wanted, _saved(wanted)))
    elif wanted.prompt is not None:
        _print_continuation(wanted)
    else:
        _print_labels(wanted)
    return 0


def _predict_own(wanted: argparse.Namespace) -> None:
    """Print or write the predictions of a user's recipe, for a split of its data or for other files."""
    from trainyard_trainer.tools.prediction import own_prediction  # it imports the engine

    if wanted.out and not wanted.out.endswith((".parquet", ".jsonl")):
        raise ConfigError(f"--out = {wanted.out}: has to end in .parquet or .jsonl")
    folder = open_run(wanted.run, wanted.storage, wanted.endpoint)
    saved = read_saved(folder, wanted.checkpoint, trusts_code=wanted.trust_code)
    options: dict[str, Any] = {"batch_size": wanted.batch_size, "device": _device()}
    if wanted.split is not None:
        table = own_prediction.predict_split(folder, saved, wanted.split, **options)
    else:
        table = own_prediction.predict_files(
            folder, saved, wanted.data, endpoint=wanted.endpoint, **options
        )
    if wanted.out:
        own_prediction.write_table(table, Path(wanted.out))
        print(f"{wanted.out}: {len(table):,} predictions", file=sys.stderr)
    else:
        own_prediction.print_table(table, as_json=wanted.json)


def _print_labels(wanted: argparse.Namespace) -> None:
    saved = _saved(wanted)
    labelled = classify_files(
        saved, wanted.files, top=wanted.top, batch_size=wanted.batch_size, device=_device()
    )
    print_labels(labelled, as_json=wanted.json)
    if wanted.grid:
        write_grid(labelled, Path(wanted.grid))


def _print_continuation(wanted: argparse.Namespace) -> None:
    folder = open_run(wanted.run, wanted.storage, wanted.endpoint)
    saved = read_saved(folder, wanted.checkpoint)
    if saved.facts["recipe"] == CAUSAL_LM:
        answer = _assistant(wanted, saved).answer(wanted.prompt)
        record = {"prompt": wanted.prompt, "text": answer}
        print(json.dumps(record, indent=2) if wanted.json else answer)
        return
    if wanted.prompt_as == "chat":
        raise ConfigError(
            f"--prompt-as chat is for runs of train.recipe = {CAUSAL_LM}, and {saved.facts['run']} is one of "
            f"{saved.facts['recipe']}"
        )
    text = continued_text(
        folder,
        saved,
        wanted.prompt,
        length=wanted.length,
        temperature=wanted.temperature,
        seed=wanted.seed,
        device=_device(),
    )
    record = {"prompt": wanted.prompt, "text": text}
    print(json.dumps(record, indent=2) if wanted.json else wanted.prompt + text)


def _assistant(wanted: argparse.Namespace, saved: Saved) -> Assistant:
    require_recipe(saved, CAUSAL_LM)
    return Assistant(
        with_base_model(saved, wanted.base_model),
        _device(),
        length=wanted.length,
        temperature=wanted.temperature,
        seed=wanted.seed,
        prompt_as=wanted.prompt_as,
    )


def _saved(wanted: argparse.Namespace) -> Saved:
    return read_saved(open_run(wanted.run, wanted.storage, wanted.endpoint), wanted.checkpoint)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def continued_text(
    folder: RunFolder,
    saved: Saved,
    prompt: str,
    *,
    length: int,
    temperature: float,
    seed: int,
    device: torch.device,
) -> str:
    """Return the text that a language model writes after the prompt, at most `length` bytes or tokens of it.

    The same seed gives the same text. The tokenizer is the one in the run's folder. Raises ConfigError for a
    model of images, and for a prompt that holds the end of a document.
    """
    require_recipe(saved, "language_model")
    recipe = saved.recipe
    assert isinstance(recipe, Language)
    codec = codec_of(folder, recipe.config)
    (found,) = continued(
        saved.build().to(device),
        codec.encode(prompt),
        length=length,
        context_length=recipe.config.context_length,
        temperature=temperature,
        seed=seed,
        separator=recipe.vocabulary.separator,
    )
    return codec.decode(found).decode(errors="replace")


def print_labels(labelled: Sequence[LabelledFile], *, as_json: bool) -> None:
    if as_json:
        records = [
            {
                "file": each.file,
                "label": each.top[0][0],
                "confidence": each.top[0][1],
                "top": [{"label": label, "confidence": sure} for label, sure in each.top],
            }
            for each in labelled
        ]
        print(json.dumps(records, indent=2))
        return
    headings = ["file"]
    for rank in range(1, len(labelled[0].top) + 1):
        suffix = f" {rank}" if rank > 1 else ""
        headings += [f"label{suffix}", f"confidence{suffix}"]
    rows = [
        (each.file, *(cell for label, sure in each.top for cell in (label, f"{sure:.4f}")))
        for each in labelled
    ]
    print(table_text(headings, rows))


def write_grid(labelled: Sequence[LabelledFile], file: Path) -> None:
    """Draw the images with their labels to a PNG file. Raises ConfigError if it cannot be written."""
    from trainyard_trainer.tools.inspection.grid import MOST, draw_grid  # it imports matplotlib

    captioned = [(each.pixels, f"{each.top[0][0]}  {each.top[0][1]:.1%}") for each in labelled]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(draw_grid(captioned))
    except OSError as error:
        raise ConfigError(f"--grid = {file} cannot be written: {error.strerror}") from error
    left_out = f", the first {MOST} of {len(labelled)}" if len(labelled) > MOST else ""
    print(f"grid: {file}{left_out}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_with_safe_streams(lambda: exit_code_of(main)))
