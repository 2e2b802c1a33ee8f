"""The documentation: the site builds without a warning, links lead somewhere, and what pages name exists."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from trainyard.cli.app import app
from trainyard.drills.final_errors import FINAL_ERRORS
from trainyard.drills.scenarios import SCENARIOS
from trainyard.planning.authoring.schema import schema_of
from trainyard_trainer.run_files import exit_codes

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
README_LIMIT = 150
"""Lines that the README may have."""


def load_generator() -> Any:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look a module up by its name
    spec.loader.exec_module(module)
    return module


GENERATED = {DOCS / name for name in load_generator().PAGES}
WRITTEN = sorted({*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("tests/*/*.md")} - GENERATED)
GUIDES = [page for page in WRITTEN if page == README or DOCS in page.parents]
COMMANDS: Any = typer.main.get_command(app)
SCHEMA = schema_of("run")
VALUES = yaml.safe_load((ROOT / "charts/trainyard/values.yaml").read_text())
NAME = {"ids": lambda page: page.relative_to(ROOT).as_posix()}


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """The fenced code blocks of a page in one of some languages."""
    found = re.findall(r"(?ms)^( *)```(\w+)\n(.*?)^\1```", page.read_text())
    for indent, language, text in found:
        if language in languages:
            yield re.sub(rf"(?m)^{indent}", "", text)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from a copy as `make docs` builds it."""
    if importlib.util.find_spec("zensical") is None:
        if os.environ.get("CI"):
            pytest.fail("zensical is missing")
        pytest.skip("zensical is missing (it needs Python 3.11)")
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(DOCS, folder / "docs")
    shutil.copy(ROOT / "zensical.toml", folder)
    load_generator().write(folder / "docs")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder / "build/docs"


def test_the_site_builds_without_a_warning_and_has_a_search_index(site: Path) -> None:
    assert (site / "index.html").exists()
    assert "gradient_boosting" in (site / "search.json").read_text()


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loaded = re.compile(
        r"""<(?:script|img|iframe|link)\b[^>]*(?:src|href)=["']?(https?:[^"'\s>]+)"""
    )
    for page in site.rglob("*.html"):
        assert loaded.findall(page.read_text()) == [], page


def test_every_page_is_in_the_navigation(site: Path) -> None:
    text = (ROOT / "zensical.toml").read_text()
    listed = re.findall(r'= "([\w/-]+\.md)" \}', text)
    pages = {page.relative_to(DOCS).as_posix() for page in {*DOCS.rglob("*.md"), *GENERATED}}
    assert sorted(listed) == sorted(pages)


@pytest.mark.parametrize("page", WRITTEN, **NAME)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    targets = [(link, (page.parent / link).resolve()) for link in links]
    assert [link for link, to in targets if not to.exists() and to not in GENERATED] == []


@pytest.mark.parametrize("page", GUIDES, **NAME)
def test_files_that_a_page_names_exist(page: Path) -> None:
    folders = "charts|docs|examples|launcher|manifests|tests|train_image"
    named = re.findall(rf"`((?:{folders})/[\w./-]+?)(?:::\w+)?`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= README_LIMIT


def commands_of(page: Path) -> Iterator[list[str]]:
    """The words of each call of `trainyard` in the shell blocks of a page."""
    for block in blocks(page, "sh", "console"):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"\s\|\s|;|&&", line.removeprefix("$ ")):
                words = shlex.split(part, comments=True)
                if words and words[0].rpartition("/")[2] == "trainyard":
                    yield words[1:]


@pytest.mark.parametrize("page", GUIDES, **NAME)
def test_commands_of_a_page_exist_with_their_options(page: Path) -> None:
    for words in commands_of(page):
        command = COMMANDS
        rest = list(words)
        while rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]
        assert not getattr(command, "commands", {}) or rest[:1] == ["--help"], words
        known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        until = rest.index("--") if "--" in rest else len(rest)
        given = {word.partition("=")[0] for word in rest[:until] if re.match(r"--?[a-z]", word)}
        assert given - known - {"--help", "--traceback"} == set(), words


def test_make_targets_of_the_documentation_exist() -> None:
    targets = set(re.findall(r"(?m)^([a-z0-9-]+):", (ROOT / "Makefile").read_text()))
    for page in GUIDES:
        shell = "\n".join(
            line.partition("#")[0] for line in "\n".join(blocks(page, "sh")).splitlines()
        )
        used = {
            word
            for words in re.findall(
                r"(?m)(?:^|;\s*|`)make((?: +[a-z][a-z0-9-]*(?![=\w-]))+)", shell
            )
            for word in words.split()
        } | set(re.findall(r"`make ([a-z0-9-]+)", page.read_text()))
        assert used - targets == set(), page


def keys_below(shape: Any, definitions: dict[str, Any]) -> dict[str, Any] | None:
    """The keys of a section of the run file, of all its kinds; None for a mapping of free keys."""
    if "$ref" in shape:
        shape = definitions[shape["$ref"].rpartition("/")[2]]
    if "properties" in shape:
        return dict(shape["properties"])
    found: dict[str, Any] = {}
    for kind in (*shape.get("anyOf", ()), *shape.get("oneOf", ())):
        for key, value in (keys_below(kind, definitions) or {}).items():
            found[key] = {"anyOf": [*found.get(key, {}).get("anyOf", ()), value]}
    return found or None


def unknown_keys(
    document: Any, shape: Any, definitions: dict[str, Any], path: str = ""
) -> Iterator[str]:
    known = keys_below(shape, definitions)
    if not isinstance(document, dict) or known is None:
        return
    for key, value in document.items():
        if key not in known:
            yield f"{path}{key}"
        else:
            yield from unknown_keys(value, known[key], definitions, f"{path}{key}.")


@pytest.mark.parametrize("page", GUIDES, **NAME)
def test_keys_of_run_files_and_values_on_a_page_exist(page: Path) -> None:
    for block in blocks(page, "yaml"):
        document = yaml.safe_load(block)
        assert isinstance(document, dict), block
        unknown = list(unknown_keys(document, SCHEMA, SCHEMA["$defs"]))
        assert not unknown or set(document) <= set(VALUES), f"{unknown} in\n{block}"


def test_each_dependency_has_a_reason() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]")[0]
    page = (DOCS / "explanation/dependencies.md").read_text()
    packages = re.findall(r'(?m)^  "([a-z0-9-]+)(?:\[[a-z,]+\])?==', pyproject)
    assert len(packages) > 20
    assert [name for name in packages if not re.search(rf"`{name}[`\[]", page)] == []


def test_the_page_of_exit_codes_has_each_code_of_a_command() -> None:
    page = (DOCS / "reference/exit-codes.md").read_text()
    documented = {int(code) for code in re.findall(r"(?m)^\| (\d+) \|", page)}
    codes = {code for name, code in vars(exit_codes).items() if name.isupper()}
    assert documented == codes - {exit_codes.NOT_FOUND}  # of a program in the pods alone


@pytest.mark.parametrize("page", GUIDES, **NAME)
def test_drills_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"(?m)trainyard drill ([a-z][a-z0-9-]*)", "".join(blocks(page, "sh")))
    assert set(named) <= {*SCENARIOS, *FINAL_ERRORS}


FOLDERS = {
    "T": "train_image/trainyard_trainer",
    "L": "launcher/trainyard",
    "C": "charts/trainyard",
}
"""The abbreviations of the table of files to change in CONTRIBUTING.md."""


def files_to_change() -> list[tuple[str, str]]:
    """Each row of the table with each file or folder that it names."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.split("## To change X, edit Y")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ")][1:]
    return [
        (what.strip(), path)
        for what, files in rows
        for path in re.findall(r"`([\w./-]+/[\w./-]*)`", files)
    ]


@pytest.mark.parametrize(("change", "path"), files_to_change())
def test_the_files_that_change_together_exist(change: str, path: str) -> None:
    top, _, rest = path.partition("/")
    assert (ROOT / FOLDERS.get(top, top) / rest).exists(), change


def test_each_change_lists_a_file() -> None:
    rows = (ROOT / "CONTRIBUTING.md").read_text().count("\n| a")
    assert len({change for change, _ in files_to_change()}) >= rows > 15
