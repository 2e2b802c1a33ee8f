"""Write the pages of docs/ that are made from the source code; `make docs` runs this first.

    python docs/generate.py [FOLDER]

Each page comes from the one place that owns its facts: the models of the run file, the chart's
values.yaml, the command line, and the docstrings of the modules. The pages are not committed, so they
cannot be out of date.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import yaml

from trainyard.cli.app import SECTIONS, app
from trainyard.planning.authoring.schema import schema_of

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts/trainyard"
PACKAGES = (ROOT / "launcher/trainyard", ROOT / "train_image/trainyard_trainer")

Object = dict[str, Any]


def cell(text: str) -> str:
    """Return a text as the content of one cell of a Markdown table."""
    return prose(" ".join(text.split())).replace("|", "\\|")


def prose(text: str) -> str:
    """Return a text whose `<` outside of inline code is no HTML."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(each if each.startswith("`") else each.replace("<", "&lt;") for each in parts)


def code(text: str) -> str:
    """Return a text as inline code within a table."""
    return f"`{text.replace('|', chr(92) + '|')}`"


# ---- The run file ----

KINDS = {
    "A recipe that trains a network": "`name`, `resources`, `data`, `train`",
    "Gradient boosting": "`name`, `resources`, `data`, `train` with `recipe: gradient_boosting`",
    "A program of your own": "`name`, `resources`, `command`",
    "A training function of your own": "`name`, `resources`, `function`",
}
RUN_FILE = """\
# Run file

A run file is one YAML file. Every key of it is listed here, with its type, its default and its meaning.
This page is generated from the pydantic models that read the file.

* Unknown keys are refused, and the error names the nearest known key.
* All problems of a file are reported at once.
* `--set KEY=VALUE` changes a key on the command line: `--set train.epochs=3`.
* `trainyard init` writes a run file in which every key is explained.
* `trainyard schema run` prints the JSON Schema, with which an editor completes and checks the file.

There are four kinds of run files. Each kind needs these keys:

"""


def run_file_page() -> str:
    """Return the reference of the run file, from its JSON Schema."""
    schema = schema_of("run")
    definitions: Object = schema["$defs"]
    lines = [RUN_FILE, "| kind of run | needs |", "|---|---|"]
    lines += [f"| {kind} | {keys} |" for kind, keys in KINDS.items()]
    lines += ["", "## Top-level keys", ""]
    lines += keys_table(schema, is_required=lambda key: key in schema["required"])
    for name in in_order_of_use(schema, definitions):
        section = definitions[name]
        lines += ["", f"## {name} {{ #{name.lower()} }}", ""]
        users = ", ".join(used_at(name, schema, definitions))
        lines += [section.get("description", ""), "", f"Used at: {users}.", ""]
        required = section.get("required", [])
        lines += keys_table(section, is_required=required.__contains__)
    return "\n".join(lines) + "\n"


def keys_table(section: Object, is_required: Callable[[str], bool]) -> list[str]:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, shape in section["properties"].items():
        default = "**required**" if is_required(key) else shown_default(shape)
        meaning = cell(shape.get("description", ""))
        rows.append(f"| {code(key)} | {type_of(shape)} | {default} | {meaning} |")
    return rows


def shown_default(shape: Object) -> str:
    if "default" not in shape or shape["default"] is None:
        return ""
    text = yaml.safe_dump([shape["default"]], default_flow_style=True, width=10**6, sort_keys=False)
    return code(text.strip()[1:-1])


def type_of(shape: Object) -> str:
    """Describe the type of a value in a few words; a section is a link to its table."""
    if "$ref" in shape:
        name = shape["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in shape:
        return " or ".join(code(str(value)) for value in shape["enum"])
    if "const" in shape:
        return code(str(shape["const"]))
    for word in ("anyOf", "oneOf"):
        if word in shape:
            kinds = [type_of(each) for each in shape[word] if each.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    kind = {"object": "mapping", "array": "list"}.get(
        shape.get("type", ""), shape.get("type", "any")
    )
    return kind + limits_of(shape)


def limits_of(shape: Object) -> str:
    signs = {
        "exclusiveMinimum": "&gt; ",
        "minimum": "≥ ",
        "exclusiveMaximum": "&lt; ",
        "maximum": "≤ ",
    }
    found = [f"{sign}{shape[word]:g}" for word, sign in signs.items() if word in shape]
    return f" ({', '.join(found)})" if found else ""


def references(shape: Any) -> Iterator[str]:
    """Yield the names of the sections that a shape refers to."""
    if isinstance(shape, dict):
        if "$ref" in shape:
            yield shape["$ref"].rpartition("/")[2]
        for value in shape.values():
            yield from references(value)
    elif isinstance(shape, list):
        for value in shape:
            yield from references(value)


def in_order_of_use(schema: Object, definitions: Object) -> list[str]:
    """Return the names of all sections, each after the one that refers to it first."""
    found: list[str] = []

    def visit(section: Object) -> None:
        for shape in section["properties"].values():
            for name in references(shape):
                if name not in found:
                    found.append(name)
                    visit(definitions[name])

    visit(schema)
    return found


def used_at(name: str, schema: Object, definitions: Object) -> list[str]:
    places = [code(key) for key, shape in schema["properties"].items() if name in references(shape)]
    for other, section in definitions.items():
        places += [
            f"`{key}` of [{other}](#{other.lower()})"
            for key, shape in section["properties"].items()
            if name in references(shape)
        ]
    return places


# ---- The chart's values ----

VALUES = """\
# Chart values

The chart `charts/trainyard` takes these values. This page is generated from `charts/trainyard/values.yaml`.
The chart refuses unknown keys and values that cannot work, all at once. Complete examples are described in
[Configure the platform](../guides/platform.md).

"""
GROUP = re.compile(r"^# ---- (?P<title>.+) ----$")
KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z0-9_]+):")


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """A key of the values of the chart, as values.yaml describes it."""

    group: str
    path: tuple[str, ...]
    meaning: str


def chart_values_page() -> str:
    """Return the reference of the chart's values, from the comments in values.yaml."""
    text = (CHART / "values.yaml").read_text()
    defaults = yaml.safe_load(text)
    lines = [VALUES]
    group = ""
    for value in values_of(text):
        if value.group != group:
            group = value.group
            lines += ["", f"## {group}", "", "| key | default | meaning |", "|---|---|---|"]
        default = defaults
        for key in value.path:
            default = default[key]
        is_section = isinstance(default, dict) and bool(default)
        shown = "" if is_section else code(flow(default))
        lines.append(f"| {code('.'.join(value.path))} | {shown} | {cell(value.meaning)} |")
    return "\n".join(lines) + "\n"


def flow(value: Any) -> str:
    text = yaml.safe_dump([value], default_flow_style=True, width=10**6, sort_keys=False)
    return text.strip()[1:-1]


def values_of(text: str) -> Iterator[Value]:
    """Yield each key that has a comment above it, in the order of the file."""
    group = ""
    comment: list[str] = []
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        heading = GROUP.match(line)
        key = KEY.match(line)
        if heading:
            group, comment = heading["title"], []
        elif line.lstrip().startswith("#"):
            comment.append(line.strip().lstrip("# "))
        elif key:
            indent = len(key["indent"])
            path = [each for each in path if each[0] < indent]
            path.append((indent, key["key"]))
            names = tuple(name for _, name in path)
            yield Value(group=group, path=names, meaning=" ".join(comment))
            comment = []
        else:
            comment = []


# ---- The command line ----

COMMANDS = """\
# Command line

This page is generated from the commands themselves. `trainyard COMMAND --help` prints the same text, and
[Exit codes](exit-codes.md) lists what each command returns. `--traceback`, with any command, shows the
traceback of an error.
"""


def command_line_page() -> str:
    """Return the reference of the command line, from typer's own description of it."""
    root: Any = typer.main.get_command(app)
    lines = [COMMANDS]
    for title, section in SECTIONS.items():
        lines += [f"## {title}", ""]
        for name in section:
            lines += command(f"trainyard {name}", root.commands[name])
    return "\n".join(lines) + "\n"


def command(name: str, described: Any) -> Iterator[str]:
    """Yield the lines of one command, or of all commands in a group."""
    commands: Mapping[str, Any] = getattr(described, "commands", {})
    if commands:
        for each, inner in commands.items():
            yield from command(f"{name} {each}", inner)
        return
    arguments = [each for each in described.params if each.param_type_name == "argument"]
    options = [
        each
        for each in described.params
        if each.param_type_name == "option" and not getattr(each, "hidden", False)
    ]
    words = [name, *(argument_name(each) for each in arguments)]
    yield f"### {name}\n"
    yield f"{prose(described.help or '')}\n"
    yield f"```text\n{' '.join(words)}{' [OPTIONS]' if options else ''}\n```\n"
    if arguments or options:
        yield "| argument or option | default | meaning |\n|---|---|---|"
        for each in arguments:
            needed = "**required**" if each.required else ""
            yield f"| {code(argument_name(each))} | {needed} | {cell(each.help or '')} |"
        for each in options:
            yield f"| {option_name(each)} | {option_default(each)} | {cell(each.help or '')} |"
        yield ""


def argument_name(argument: Any) -> str:
    name = (argument.metavar or argument.name.upper()).strip("[]")
    many = "..." if argument.nargs == -1 else ""
    return f"{name}{many}" if argument.required else f"[{name}{many}]"


def option_name(option: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar or 'VALUE'}"
    return ", ".join(code(f"{name}{value}") for name in (*option.opts, *option.secondary_opts))


def option_default(option: Any) -> str:
    if option.default is None or option.default is False or option.default == []:
        return ""
    if option.default is True:
        return code(option.opts[0])
    return code(str(option.default))


# ---- The source tree ----

TREE = """\
# GitState tree

What each file is for. This page is generated from the first line of every module's docstring, and from
the first comment of the chart's templates. The table *To change X, edit Y* in `CONTRIBUTING.md` says which
files change together.
"""
OTHER_FOLDERS = {
    "charts/trainyard": "The shape of a Ray cluster: pods, pools, storage, security; the platform.",
    "manifests": "The template of the RayJob. The wheel contains it as `trainyard/rayjob.yaml.j2`.",
    "examples": "Run files. Each of them is a test case too.",
    "examples/byo": "Code of your own, as the run files in `examples` use it.",
}


def source_tree_page() -> str:
    """Return one table per folder of the source code."""
    lines = [TREE]
    for package in PACKAGES:
        folders = [package, *sorted(each for each in package.rglob("*") if each.is_dir())]
        for folder in folders:
            modules = sorted(folder.glob("*.py"))
            if modules:
                lines += folder_table(folder, modules)
    for name, meaning in OTHER_FOLDERS.items():
        lines += [f"## {name}/", "", meaning, "", "| file | purpose |", "|---|---|"]
        files = (
            (ROOT / name).rglob("*.*") if name.startswith("charts") else (ROOT / name).glob("*.*")
        )
        for file in sorted(each for each in files if each.is_file()):
            if purpose := purpose_of(file):
                path = file.relative_to(ROOT / name).as_posix()
                lines.append(f"| {code(path)} | {cell(purpose)} |")
        lines.append("")
    return "\n".join(lines) + "\n"


def folder_table(folder: Path, modules: list[Path]) -> list[str]:
    lines = [f"## {folder.relative_to(ROOT).as_posix()}/", ""]
    init = folder / "__init__.py"  # a folder of the import path is no package
    if init in modules and (story := ast.get_docstring(ast.parse(init.read_text()))):
        lines += [prose(story), ""]
    rows = [
        f"| {code(module.name)} | {cell(purpose_of(module))} |"
        for module in modules
        if module != init
    ]
    return [*lines, "| module | purpose |", "|---|---|", *rows, ""] if rows else lines


def purpose_of(file: Path) -> str:
    """Return the first paragraph that a file says of itself, or an empty text."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0]
    if found := re.search(
        r"\{\{-? ?/\*(?P<comment>.*?)\*/", "\n".join(text.splitlines()[:8]), re.DOTALL
    ):
        return found["comment"].strip().partition("\n\n")[0]
    if file.suffix in (".yaml", ".j2"):
        comment = re.match(r"(?:# yaml-language-server.*\n)?((?:#.*\n)+)", text)
        if comment:
            return sentences(" ".join(line.strip("# ") for line in comment[1].splitlines()))
        kinds = dict.fromkeys(re.findall(r"(?m)^kind: (\w+)$", text))
        return f"Makes: {', '.join(kinds)}." if kinds else ""
    return ""


def sentences(text: str) -> str:
    """Return the first sentence of a text."""
    return re.split(r"(?<=[.])\s", text)[0]


PAGES: Mapping[str, Callable[[], str]] = {
    "reference/run-file.md": run_file_page,
    "reference/chart-values.md": chart_values_page,
    "reference/command-line.md": command_line_page,
    "explanation/source-tree.md": source_tree_page,
}
"""Path below docs/ -> what makes the page."""


def write(folder: Path) -> None:
    """Write all generated pages below a folder; a page that has not changed is left alone."""
    for name, page in PAGES.items():
        file = folder / name
        text = page()
        if not file.exists() or file.read_text() != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python docs/generate.py", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "docs")
    write(parser.parse_args().folder)
