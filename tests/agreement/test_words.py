"""Each name has one meaning, and each docstring can be understood without the name above it."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (ROOT / "launcher/trainyard", ROOT / "train_image/trainyard_trainer")
FEWEST_WORDS = 5
TWICE = {"ConfigError"}
"""Class names that both packages have on purpose: the same meaning, in each one's errors."""

Defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def definitions() -> list[tuple[str, Defined]]:
    """Each class and function of both packages with its place."""
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno}", node)
        for package in PACKAGES
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]


def test_no_docstring_has_fewer_than_five_words() -> None:
    short = [
        f"{place}: {docstring!r}"
        for place, node in definitions()
        if (docstring := ast.get_docstring(node)) and len(docstring.split()) < FEWEST_WORDS
    ]
    assert short == []


def test_each_class_name_stands_for_one_class() -> None:
    places = defaultdict(list)
    for place, node in definitions():
        if isinstance(node, ast.ClassDef):
            places[node.name].append(place)
    assert {name: at for name, at in places.items() if len(at) > 1 and name not in TWICE} == {}
