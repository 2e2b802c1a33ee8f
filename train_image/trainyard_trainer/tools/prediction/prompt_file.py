"""A file of prompts: read its rows, and write it with the answers of a model beside them.

The output has the same rows in the same order, with all their columns and these:

    predicted     the answer
    error         why a row has none, with the row's file and line
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from trainyard_trainer.data.sources.chats.chat_files import ChatFiles, SourceRow
from trainyard_trainer.data.sources.chats.examples import WrongRow, question_of
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.tools.prediction.batch_prediction import Counts
from trainyard_trainer.tools.prediction.chat import Assistant

ANSWER = pa.schema([("predicted", pa.string()), ("error", pa.string())])
"""The columns that are added to a row."""

LABEL = "answer"
"""The column that answers are compared with, unless --label-column names one."""

NAMES = ("FILE", "--endpoint")
"""How the command line calls the file and its endpoint."""


@dataclass(frozen=True, kw_only=True)
class PromptFile:
    """A file whose rows have prompts, and the file that gets the answers."""

    files: ChatFiles
    out: RunFolder
    """The root is the file to write."""
    kept: pa.Table | None
    """All columns of the input for a Parquet file; JSON lines are read again when they are written."""
    num_rows: int

    @classmethod
    def open(
        cls, path: str, out: RunFolder, shown: str, endpoint: str | None, label_column: str | None
    ) -> PromptFile:
        """Open the input; `shown` is `out` for messages. Raises ConfigError if it cannot get answers."""
        if out.exists(out.root):
            raise ConfigError(f"--out = {shown} exists already. Name another one, or remove it.")
        files = ChatFiles.open_file(path, endpoint, keys=NAMES)
        names: dict[str, None] = {}
        rows: list[Mapping[str, Any]] = []
        is_parquet = out.root.endswith(".parquet")
        num_rows = 0
        for num_rows, source in enumerate(files.rows(None), 1):  # noqa: B007 - it is the number at the end
            row = columns_of(source)
            names.update(dict.fromkeys(row))
            if is_parquet and not files.is_table:
                rows.append(row)
        if not num_rows:
            raise ConfigError(f"{path} has no rows")
        if taken := [name for name in ANSWER.names if name in names]:
            raise ConfigError(
                f"{path} already has a column {taken[0]}, which the predictions would add. Rename it."
            )
        if label_column is not None and label_column not in names:
            raise ConfigError(f"{path} has no column {label_column} (--label-column).")
        kept = None
        if is_parquet:
            kept = files.table() if files.is_table else _table_of(rows, names, path)
        return cls(files=files, out=out, kept=kept, num_rows=num_rows)

    def parts(self, size: int) -> Iterator[pa.Table]:
        """Yield the rows in parts: the number of each one, the row as JSON, its place, and a problem."""
        sources = enumerate(self.files.rows(None))
        while part := list(islice(sources, size)):
            content = [json.dumps(source.row, default=str) for _, source in part]
            yield pa.table(
                {
                    "row": pa.array([row for row, _ in part], pa.int64()),
                    "content": pa.array(content, pa.string()),
                    "place": pa.array([str(source.location) for _, source in part], pa.string()),
                    "problem": pa.array([source.problem for _, source in part], pa.string()),
                }
            )

    def write(self, answers: pa.Table, label_column: str) -> Counts:
        """Write the file with the answers, which are in the order of the rows, and count them."""
        predicted, errors = answers["predicted"].to_pylist(), answers["error"].to_pylist()
        found = zip(self.files.rows(None), predicted, errors, strict=True)
        counts = Counts(rows=len(predicted))
        with self.out.writing(self.out.root) as stream:
            for source, answer, error in found:
                row = columns_of(source)
                _count(counts, row.get(label_column), answer, error)
                if self.kept is None:
                    line = json.dumps(
                        {**row, "predicted": answer, "error": error},
                        ensure_ascii=False,
                        default=str,
                    )
                    # What is half of a character stays an escape of JSON.
                    stream.write(line.encode(errors="backslashreplace") + b"\n")
            if self.kept is not None:
                table = self.kept
                for field in ANSWER:
                    table = table.append_column(field, answers[field.name])
                parquet.write_table(table, stream)
        return counts


def columns_of(source: SourceRow) -> Mapping[str, Any]:
    """Return the columns of a row; none if it is no object."""
    return source.row if isinstance(source.row, Mapping) else {}


def _table_of(rows: Sequence[Mapping[str, Any]], names: Mapping[str, None], path: str) -> pa.Table:
    """Return rows of JSON as a table. Raises ConfigError if a column has values of several types."""
    columns = {}
    for name in names:
        try:
            column = pa.array([row.get(name) for row in rows])
            with parquet.ParquetWriter(pa.BufferOutputStream(), pa.schema([(name, column.type)])):
                columns[name] = column
        except (pa.ArrowException, UnicodeEncodeError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"{path}: column {name} fits no type of Parquet: {reason}. Write a .jsonl file (--out)."
            ) from None
    return pa.table(columns) if columns else pa.table({"row": list(range(len(rows)))}).select([])


def _count(counts: Counts, label: Any, answer: str | None, error: str | None) -> None:
    if error is not None:
        counts.bad_rows += 1
        counts.first_error = counts.first_error or error
    if answer is not None and isinstance(label, str):
        counts.labelled_rows += 1
        counts.agreeing_rows += answer.strip() == label.strip()


def answers_to(assistant: Assistant, rows: pa.Table, *, batch_size: int) -> pa.Table:
    """Return the number of each row, and its answer or why it has none, for a table of `parts`."""
    predicted: list[str | None] = [None] * len(rows)
    errors: list[str | None] = [None] * len(rows)
    prompts: dict[int, list[int]] = {}
    for place, row in enumerate(rows.to_pylist()):
        try:
            if row["problem"] is not None:
                raise WrongRow(row["problem"])
            prompts[place] = assistant.tokens_of(question_of(json.loads(row["content"])))
        except WrongRow as reason:
            errors[place] = f"{row['place']}: {reason}"
    # Prompts of about the same length are read together, since each batch is as wide as its longest one.
    places = sorted(prompts, key=lambda place: len(prompts[place]))
    numbers = rows["row"].to_pylist()
    for start in range(0, len(places), batch_size):
        batch = places[start : start + batch_size]
        answers = assistant.answers(
            [prompts[place] for place in batch], [numbers[place] for place in batch]
        )
        for place, answer in zip(batch, answers, strict=True):
            predicted[place] = answer
    return pa.table(
        {
            "row": rows["row"],
            "predicted": pa.array(predicted, pa.string()),
            "error": pa.array(errors, pa.string()),
        }
    )
