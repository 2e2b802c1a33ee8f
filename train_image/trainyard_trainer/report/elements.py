"""Small pieces of the page, and numbers as people say them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)

    top = f"<thead><tr>{cells(head, 'th')}</tr></thead>" if head else ""
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<table>{top}<tbody>{body}</tbody></table>"


def written(cards: Iterable[tuple[str, str, str]]) -> str:
    """Show texts of a language model: of each a title, the prompt in soft letters, and what follows it."""
    shown = "".join(
        f'<div class="card"><h3>{escape(title)}</h3>'
        f"<pre><span>{escape(prompt)}</span>{escape(text)}</pre></div>"
        for title, prompt, text in cards
    )
    return f'<div class="written">{shown}</div>'


def note(text: str) -> str:
    return f'<p class="card note">{escape(text)}</p>'


def bar(share: float) -> str:
    return f'<div class="bar"><div style="width:{share:.1%}"></div></div>'


def count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def duration(seconds: float) -> str:
    if 0 < seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
