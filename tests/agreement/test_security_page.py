"""docs/explanation/security.md is true: its tests exist, and its table of rights is the chart's Role."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.agreement.security_page import PAGE, documented_rights
from tests.charts.helm_chart import only, render

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "train_image/requirements.txt"
TEST = re.compile(r"`(tests/\S+\.py)::(test_\w+)`")


def test_the_table_of_rights_is_the_chart_s_role() -> None:
    rights = {
        (f"{resource}.{group}" if group else resource): set(rule["verbs"])
        for rule in only(render({}), "Role")["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert documented_rights() == rights


def test_each_promise_names_a_test_that_exists() -> None:
    promises = PAGE.read_text().partition("## Promises")[2].partition("\n## ")[0]
    rows = [line for line in promises.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 11
    for row in rows:
        named = TEST.findall(row)
        assert named, row
        for file, name in named:
            functions = {
                node.name
                for node in ast.walk(ast.parse((ROOT / file).read_text()))
                if isinstance(node, ast.FunctionDef)
            }
            assert name in functions, f"{file} has no {name}"


def test_every_locked_package_has_one_version_and_its_sums() -> None:
    lines = LOCK.read_text().replace("\\\n", " ").splitlines()
    packages = [line for line in lines if line and not line.startswith((" ", "#"))]
    names = [line.partition("==")[0] for line in packages]
    assert len(names) == len(set(names)) > 50
    for line in packages:
        assert re.match(r"[a-z0-9.-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", line), line
