"""Read ignore rules as git reads them: the format of gitignore(5), with the wildcards of git's wildmatch.

Libraries for these rules differ from git for brackets, trailing tabs and rules that take folders back in. A
test compares this module with git itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

BOM = b"\xef\xbb\xbf"
CLASSES = {
    "alnum": "A-Za-z0-9",
    "alpha": "A-Za-z",
    "blank": r"\ \t",
    "cntrl": r"\x00-\x1f\x7f",
    "digit": "0-9",
    "graph": r"\x21-\x7e",
    "lower": "a-z",
    "print": r"\x20-\x7e",
    "punct": r"\x21-\x2f\x3a-\x40\x5b-\x60\x7b-\x7e",
    "space": r"\ \t-\r",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}
"""Character classes such as [:alpha:], as regular expressions write them in brackets."""

ENCODING = "latin-1"
"""The encoding with which each byte is a character of its own: git's wildcards match bytes."""


WILDCARD = re.compile(r"[*?\[\\]")


class _NoPattern(Exception):
    """A line that matches nothing, such as one with a bracket that is not closed."""


@dataclass(frozen=True, slots=True)
class IgnoreRule:
    """One line of a file of ignore rules."""

    pattern: re.Pattern[str]
    is_negated: bool
    """Whether the rule takes back in what an earlier one left out."""
    is_for_folders: bool
    """Whether the rule is for folders alone."""
    is_for_names: bool
    """Whether the rule compares the last part of a path, in any folder, and not the whole path."""

    def matches(self, path: str, *, is_folder: bool) -> bool:
        """Return whether the rule matches a path, whose bytes are decoded by ENCODING."""
        if self.is_for_folders and not is_folder:
            return False
        return bool(self.pattern.fullmatch(path.rpartition("/")[2] if self.is_for_names else path))


def parse_rules(content: bytes) -> tuple[IgnoreRule, ...]:
    """Return the rules of a file: UTF-8 with or without a mark, with lines that end with LF or CRLF."""
    text = content.removeprefix(BOM).decode(ENCODING)
    return tuple(rule for line in text.split("\n") for rule in _rules(line.removesuffix("\r")))


def verdict(rules: tuple[IgnoreRule, ...], path: str, *, is_folder: bool) -> bool | None:
    """Return whether the last rule that matches a path leaves it out; None if no rule matches."""
    path = os.fsencode(path).decode(ENCODING)
    for rule in reversed(rules):
        if rule.matches(path, is_folder=is_folder):
            return not rule.is_negated
    return None


def _rules(line: str) -> Iterator[IgnoreRule]:
    """Yield the rule of a line, if it has one."""
    if line.startswith("#"):
        return
    is_negated = line.startswith("!")
    text = _without_trailing_spaces(line.removeprefix("!"))
    is_for_folders = text.endswith("/")
    text = text.removesuffix("/")
    is_for_names = "/" not in text
    text = text.removeprefix("/")
    if not text:
        return
    try:
        pattern = _translate(text, is_for_names=is_for_names)
    except _NoPattern:
        return
    yield IgnoreRule(pattern, is_negated, is_for_folders, is_for_names)


def _without_trailing_spaces(text: str) -> str:
    """Remove the spaces at the end of a line, but for one that a backslash protects."""
    stripped = text.rstrip(" ")
    backslashes = len(stripped) - len(stripped.rstrip("\\"))
    return stripped + " " if backslashes % 2 and stripped != text else stripped


def _translate(text: str, *, is_for_names: bool) -> re.Pattern[str]:
    """Translate a pattern to a regular expression. Raises _NoPattern."""
    parts: list[str] = []
    index = 0
    while index < len(text):
        letter = text[index]
        if letter == "*":
            end = index
            while text[end : end + 1] == "*":
                end += 1
            # git compares the text before the first wildcard by itself, and matches what is left of both.
            starts_part = text[index - 1 : index] in ("", "/") or not WILDCARD.search(text[:index])
            is_double = end - index > 1 and starts_part and not is_for_names
            if is_double and end == len(text):
                parts.append(".*")
            elif is_double and text[end] == "/":
                parts.append("(?:.*/)?")
                end += 1
            else:
                parts.append("[^/]*")
            index = end
        elif letter == "?":
            parts.append("[^/]")
            index += 1
        elif letter == "[":
            bracket, index = _bracket(text, index + 1)
            parts.append(bracket)
        elif letter == "\\":
            if index + 1 == len(text):
                raise _NoPattern
            parts.append(re.escape(text[index + 1]))
            index += 2
        else:
            parts.append(re.escape(letter))
            index += 1
    return re.compile("".join(parts), re.DOTALL)


def _bracket(text: str, index: int) -> tuple[str, int]:
    """Translate a bracket; return it and the index behind it. Raises _NoPattern if it is not closed."""
    is_negated = text[index : index + 1] in ("!", "^")
    index += is_negated
    members: list[str] = []
    first = index
    while True:
        if index >= len(text):
            raise _NoPattern
        if text[index] == "]" and index > first:
            break
        if text.startswith("[:", index):
            name, closed, _ = text[index + 2 :].partition(":]")
            if not closed or name not in CLASSES:
                raise _NoPattern
            members.append(CLASSES[name])
            index += len(name) + 4
            continue
        low, index = _member(text, index)
        if text[index : index + 1] == "-" and text[index + 1 : index + 2] not in ("", "]"):
            high, index = _member(text, index + 1)
            # A range that runs backwards has its first character only.
            members.append(f"{re.escape(low)}-{re.escape(high if low <= high else low)}")
        else:
            members.append(re.escape(low))
    inside = "".join(members)
    if not inside:
        return ("[^/]" if is_negated else "(?!)"), index + 1
    return f"(?!/)[{'^' if is_negated else ''}{inside}]", index + 1


def _member(text: str, index: int) -> tuple[str, int]:
    """Return a character of a bracket, which a backslash may protect, and the index behind it."""
    if text[index] == "\\":
        index += 1
    if index >= len(text):
        raise _NoPattern
    return text[index], index + 1
