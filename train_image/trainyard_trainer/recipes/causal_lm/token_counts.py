"""What became of the rows of a source of tokens, in words: for the report and for `data inspect`."""

from __future__ import annotations

from trainyard_trainer.data.prepared import TokenCounts, TokenInfo


def count_rows(info: TokenInfo) -> list[tuple[str, str, str]]:
    """Return a row for each count: its name, and the values of the training and the validation split."""
    train, valid = _texts_of(info.train), _texts_of(info.valid)
    return [(name, train[name], valid[name]) for name in train]


def _texts_of(counts: TokenCounts) -> dict[str, str]:
    return {
        "rows of the source": f"{counts.source_rows:,}",
        "samples": f"{counts.samples:,}",
        "tokens": f"{counts.tokens:,}",
        "tokens that are learnt": f"{counts.learnt_tokens:,}",
        "stored tokens that are not padding": f"{counts.fill_rate:.1%}",
        "rows whose end was cut off": f"{counts.truncated_rows:,}",
        "tokens that were cut off": f"{counts.truncated_tokens:,}",
        "rows that were split": f"{counts.split_rows:,}",
        "samples left out, without a learnt token": f"{counts.left_out:,}",
        "tokens of the longest sample": f"{counts.longest_sample:,}",
    }
