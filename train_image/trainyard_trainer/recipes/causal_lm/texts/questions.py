"""Questions with known answers, which a run asks its model at each validation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainyard_trainer.config.training.train import Questions
from trainyard_trainer.data.preparation.bad_samples import bad_record, listed
from trainyard_trainer.data.sources.chats.chat_files import ChatFiles
from trainyard_trainer.data.sources.chats.examples import WrongRow, question_of
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.recipes.causal_lm.documents import IGNORED, Documents
from trainyard_trainer.recipes.causal_lm.texts.generation import continued
from trainyard_trainer.recipes.causal_lm.texts.prompts import Prompts
from trainyard_trainer.recipes.recipe import Forward

SHOWN = 20
"""The number of answers that the report shows, of the first questions that rank 0 has asked."""

SHOWN_LETTERS = 500
"""The number of letters of a question or an answer that the report shows."""

GIVEN_ANSWERS = "answers"
"""The key of validation.json with the answers that the report shows."""

KEYS = ("train.questions.path", "train.questions.endpoint")
"""The keys of the run file that name the questions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownAnswer:
    """A question with its answer."""

    number: int
    """The place among the questions, from 0."""
    question: str
    """What is asked, as text; of a chat its last message."""
    prompt: Sequence[int]
    """The tokens of the question."""
    answer: str
    """The answer, or a regular expression for it."""
    choices: Sequence[tuple[Sequence[int], int]] = ()
    """With `match: choice`, for each choice the tokens of prompt and choice, and where the choice begins."""
    choice_texts: Sequence[str] = ()
    """The same choices as text."""
    right: int = 0
    """The number of the right choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenAnswer:
    """The model's answer to a question."""

    known: KnownAnswer
    text: str
    """What the model has written or chosen."""
    is_right: bool

    def to_json(self) -> dict[str, Any]:
        """Return the entry of validation.json, whose texts are cut."""
        texts = {"question": self.known.question, "answer": self.known.answer, "given": self.text}
        return {name: text[:SHOWN_LETTERS] for name, text in texts.items()} | {
            "is_right": self.is_right
        }


def read_questions(
    asked: Questions, prompts: Prompts, *, context_length: int, endpoint: str | None
) -> list[KnownAnswer]:
    """Read all questions. Raises ConfigError with the places of the rows that cannot be used."""
    files = ChatFiles.open_file(asked.path, asked.endpoint or endpoint, keys=KEYS)
    found: list[KnownAnswer] = []
    bad: list[dict[str, Any]] = []
    for source in files.rows(None):
        try:
            if source.problem is not None:
                raise WrongRow(source.problem)
            found.append(
                _known_answer(len(found), source.row, asked, prompts, context_length=context_length)
            )
        except WrongRow as reason:
            bad.append(bad_record(source.location, str(reason)))
    if bad:
        raise ConfigError(
            f"train.questions.path = {asked.path}: rows that cannot be used: {len(bad)}:{listed(bad)}"
        )
    if not found:
        raise ConfigError(f"train.questions.path = {asked.path} has no rows")
    return found


def _known_answer(
    number: int, row: Any, asked: Questions, prompts: Prompts, *, context_length: int
) -> KnownAnswer:
    """Return the question of a row. Raises WrongRow."""
    question = question_of(row)
    answer = row.get("answer")
    if not isinstance(answer, str):
        raise WrongRow(f"answer is {answer!r}; it has to be text")
    tokens = prompts.of_question(question)
    longest = len(tokens) + asked.max_tokens
    choices: list[tuple[Sequence[int], int]] = []
    texts: Any = ()
    right = 0
    match asked.match:
        case "regex":
            try:
                re.compile(answer)
            except re.error as error:
                raise WrongRow(f"answer is no regular expression: {error}") from None
        case "choice":
            texts = row.get("choices")
            if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
                raise WrongRow("match: choice needs choices, a list of texts")
            if answer not in texts:
                raise WrongRow(f"answer {answer!r} is none of the choices")
            choices, right = (
                [prompts.of_choice(question, each) for each in texts],
                texts.index(answer),
            )
            longest = max(len(each) for each, _ in choices)
    if longest > context_length:
        rest = "" if choices else f" with max_tokens = {asked.max_tokens}"
        raise WrongRow(
            f"it has {longest:,} tokens{rest}, and train.context_length is {context_length:,}"
        )
    prompt = question.prompt
    return KnownAnswer(
        number=number,
        question=prompt if isinstance(prompt, str) else str(prompt[-1]["content"]),
        prompt=tokens,
        answer=answer,
        choices=choices,
        choice_texts=texts,
        right=right,
    )


class Examination:
    """Asks the questions of a run on one worker."""

    def __init__(
        self,
        questions: Sequence[KnownAnswer],
        asked: Questions,
        prompts: Prompts,
        *,
        batch_size: int,
    ) -> None:
        """`batch_size` is the number of texts that the model gets at once."""
        self._questions = questions
        self._asked = asked
        self._prompts = prompts
        widest = max(len(each.choices) for each in questions) or 1
        self._size = max(1, batch_size // widest)
        self.shown: list[GivenAnswer] = []
        """The answers to the first questions of this worker's share, once `run` has ended."""

    def run(self, model: Forward, worker: Worker, *, is_sharded: bool) -> tuple[int, int]:
        """Ask this worker's share of the questions, and return how many were answered correctly, and asked.

        With a sharded model, all workers call it equally often: who has no question left asks the first one.
        """
        mine = sorted(
            self._questions[worker.rank :: worker.world_size], key=lambda each: len(each.prompt)
        )
        answer = self._choose if self._asked.match == "choice" else self._write
        given: list[GivenAnswer] = []
        for start in range(0, -(-len(self._questions) // worker.world_size), self._size):
            batch = mine[start : start + self._size]
            if batch:
                given += answer(model, batch, worker, is_sharded)
            elif is_sharded:
                answer(model, self._questions[:1], worker, is_sharded)
        self.shown = sorted(given, key=lambda each: each.known.number)[:SHOWN]
        return sum(each.is_right for each in given), len(mine)

    def _write(
        self, model: Forward, batch: Sequence[KnownAnswer], worker: Worker, is_sharded: bool
    ) -> list[GivenAnswer]:
        """Let the model write an answer to each question."""

        def unfinished(count: int) -> int:
            if not is_sharded:
                return count
            return int(worker.sum(torch.tensor(count, device=worker.device)))

        written = continued(
            model,
            [each.prompt for each in batch],
            length=self._asked.max_tokens,
            temperature=0.0,
            seed=0,
            ends=self._prompts.ends,
            padding=self._prompts.padding,
            device=worker.device,
            unfinished=unfinished,
        )
        texts = map(self._prompts.text_of, written)
        return [
            GivenAnswer(
                known=each, text=text, is_right=is_match(self._asked.match, text, each.answer)
            )
            for text, each in zip(texts, batch, strict=True)
        ]

    def _choose(
        self, model: Forward, batch: Sequence[KnownAnswer], worker: Worker, is_sharded: bool
    ) -> list[GivenAnswer]:
        """Return for each question the choice to which the model gives the highest probability."""
        losses = iter(
            losses_of(
                model, [each for question in batch for each in question.choices], worker.device
            )
        )
        found = []
        for question in batch:
            of_choices = [next(losses) for _ in question.choices]
            best = of_choices.index(min(of_choices))
            text = question.choice_texts[best]
            found.append(GivenAnswer(known=question, text=text, is_right=best == question.right))
        return found


def is_match(match: str, text: str, answer: str) -> bool:
    """Return whether a text is the answer, or has a place that the regular expression `answer` matches."""
    if match == "regex":
        return re.search(answer, text) is not None
    return text.strip() == answer.strip()


def losses_of(
    model: Forward, texts: Sequence[tuple[Sequence[int], int]], device: torch.device
) -> list[float]:
    """Return the summed cross entropy of the end of each text; each is its tokens, and where the end begins.

    It is the logarithm of the probability of the end, with another sign.
    """
    longest = max(len(tokens) for tokens, _ in texts)
    tokens = torch.zeros(len(texts), longest, dtype=torch.int64)
    targets = torch.full_like(tokens, IGNORED)
    for row, (ids, start) in enumerate(texts):
        tokens[row, : len(ids)] = torch.tensor(ids)
        targets[row, start - 1 : len(ids) - 1] = torch.tensor(ids[start:])
    positions = torch.arange(longest).expand(len(texts), longest)
    documents = Documents(positions.to(device), targets.to(device))
    losses: Tensor = model(tokens.to(device), documents, by_row=True)
    return losses.tolist()
