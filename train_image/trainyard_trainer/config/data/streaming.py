"""Which sources can be streamed, by the endings of their names: read in groups of rows as they are."""

from __future__ import annotations

from pydantic_core import PydanticCustomError

STREAMED = (
    "Parquet, Lance, Arrow files of `datasets` on a disk, or tar shards of WebDataset without "
    "compression"
)

NOT_STREAMED = {
    (".csv", ".tsv", ".jsonl", ".ndjson"): "a text file has no index of its rows",
    (".npz", ".npy"): "arrays of NumPy are read as a whole",
    (".arrow",): "an Arrow file in an object store is read as a whole",
    (".tgz", ".gz", ".zst", ".bz2", ".zip"): "a compressed file is read only from its beginning",
}
"""Why files with these endings cannot be read at random."""


def why_not_streamed(source: str) -> str:
    """Say why a source cannot be streamed, and what to do."""
    reasons = (why for endings, why in NOT_STREAMED.items() if source.lower().endswith(endings))
    why = next(reasons, "its files are read as a whole")
    return f"{why}. Use {STREAMED}, or leave data.stream out."


def require_streamed(source: str) -> None:
    """Raise PydanticCustomError for a source whose name says already that it cannot be streamed."""
    is_remote = "://" in source
    for endings in NOT_STREAMED:
        if source.lower().endswith(endings) and (is_remote or ".arrow" not in endings):
            raise PydanticCustomError(
                "one_of",
                "stream: {source} cannot be streamed: {why}",
                {"source": source, "why": why_not_streamed(source)},
            )
