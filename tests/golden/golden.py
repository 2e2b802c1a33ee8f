"""What the golden files hold: rendered objects of each example, keys sorted.

`python -m tests.golden.golden` (`make golden`) is the only thing that writes them. The packaged
platform is a golden file too: the chart at its default values. So are the JSON Schemas, the schema of
KubeRay's objects, the page of known failures and the list of metrics.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import yaml

from tests.charts.crd_schemas import OPERATOR, module_folder
from tests.charts.kuberay_schema import kuberay_schema
from trainyard.diagnosis.page import catalogue_page
from trainyard.planning.authoring.schema import Kind, schema_of
from trainyard.planning.merge import merge
from trainyard.planning.plan import plan_run
from trainyard.planning.render import render_job
from trainyard.platform import CONFIG_MAP_KEY, parse_platform
from trainyard.run_file.load import load_run
from trainyard_trainer.config.data.sources import CHATS, IMAGES, TABLES, TEXT, sources_table
from trainyard_trainer.data.sources.column_types import column_types_table
from trainyard_trainer.run_folder.measurements.metrics import metrics_page
from trainyard_trainer.user_code import library_variables

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "objects"
PLATFORM = ROOT / "launcher/trainyard/platform.yaml"
PAGE = ROOT / "docs/reference/failures.md"
METRICS_PAGE = ROOT / "docs/reference/metrics.md"
SCHEMAS = ROOT / "schemas"
KUBERAY_SCHEMA = ROOT / "launcher/trainyard/kuberay_schema.json"
TABLES_OF_DOCS: dict[str, Callable[[], str]] = {
    "data sources": lambda: sources_table(IMAGES),
    "all data sources": lambda: sources_table(IMAGES, TEXT, CHATS, TABLES),
    "column types": column_types_table,
    "library variables": library_variables.table,
}
"""Tables of the documentation that are made from registries of the code, by the names in pages."""
TABLE = re.compile(
    rf"(<!-- ({'|'.join(TABLES_OF_DOCS)}), written by make golden -->\n)(.*?)(<!-- end -->)", re.S
)
"""Where a page of the documentation has such a table."""
ON_DATA_NODES = ("data.loader=ray", "resources.data={nodes: 2}")
QUEUE = {"system": "kueue", "name": "team"}


def _packed_shape() -> dict[str, Any]:
    """The packaged shape, with a topologyKey of its pool of GPUs for Kueue."""
    shape: dict[str, Any] = yaml.safe_load(PLATFORM.read_text())["rayClusterSpec"]
    (group,) = (each for each in shape["workerGroupSpecs"] if each["groupName"] == "gpu")
    packed = {"kueue.x-k8s.io/podset-preferred-topology": "rack"}
    group["template"]["metadata"]["annotations"] = packed
    return shape


CASES: dict[str, tuple[dict[str, str], dict[str, Any], tuple[str, ...]]] = {
    "workers-2": ({"workers": "2"}, {}, ()),
    "workers-1-to-2-data": ({"workers": "1:2"}, {}, ON_DATA_NODES),
    "gpus-4": ({"gpus": "4"}, {}, ()),
    "gpus-16": ({"gpus": "16"}, {}, ()),
    "gpus-16-data": ({"gpus": "16"}, {}, ON_DATA_NODES),
    "gpus-8-to-16": ({"gpus": "8:16"}, {}, ()),
    "gpus-16-kueue": ({"gpus": "16"}, {"queue": QUEUE}, ("queue.priority=high",)),
    "gpus-16-packed": (
        {"gpus": "16"},
        {"queue": QUEUE, "rayClusterSpec": _packed_shape()},
        ("resources.topology_mode=required",),
    ),
    "gpus-8-to-16-kueue": ({"gpus": "8:16"}, {"queue": QUEUE | {"elastic": True}}, ()),
    "gpus-16-efa": (
        {"gpus": "16"},
        {},
        ("network.preset=efa", "network.devices_per_node=32", "network.interface=eth0"),
    ),
    "workers-2-standing": (
        {"workers": "2"},
        {"standingCluster": {"name": "trainyard", "pool": "cpu", "nodes": 2}},
        ("resources.cluster=trainyard",),
    ),
    "workers-2-own": (
        {"workers": "2"},
        {"runs": {"env": {"deny": []}, "secrets": ["hub"], "labels": ["example.com/*"]}},
        (
            "env.OMP_NUM_THREADS='4'",
            "secrets.HF_TOKEN={name: hub, key: token}",
            "notify={secret: {name: hub, key: chat}, outcomes: [failed]}",
            "labels={example.com/team: vision}",
            "annotations={example.com/note: nightly}",
        ),
    ),
}
"""Name -> resources, what the platform says otherwise, and `--set`."""
EXAMPLES = {
    "digits": tuple(CASES),
    "command": ("workers-2", "gpus-16", "gpus-16-kueue"),
    "function": ("workers-2", "gpus-16"),
    "gradient_boosting": ("workers-2",),
    "language_model": ("workers-2", "gpus-16"),
    "finetune": ("workers-2", "gpus-16"),
    "torchrun": ("workers-2", "gpus-16"),
    "regression": ("workers-2", "gpus-16"),
    # Recipes of the user differ in their code alone.
    "autoencoder": (),
    "segmentation": (),
    "two_tower": (),
    "gan": (),
    "timm_finetune": (),
}
"""Which of them are rendered of each example."""


def expected_files() -> dict[Path, Callable[[], str]]:
    """Return what makes the text of each golden file of rendered objects, by its path."""
    return {
        FOLDER / f"{example.stem}-{name}.yaml": partial(
            rendered, example, resources, changes=changes, settings=settings
        )
        for example in sorted((ROOT / "examples").glob("*.yaml"))
        for name in EXAMPLES[example.stem]
        for resources, changes, settings in (CASES[name],)
    }


def rendered(
    example: Path,
    resources: dict[str, str],
    template: str | None = None,
    *,
    changes: dict[str, Any] | None = None,
    settings: tuple[str, ...] = (),
) -> str:
    """The RayJob of an example on the packaged platform, or on one with some keys changed; without the
    archive of its code, which other tests look at."""
    platform = parse_platform(
        yaml.safe_dump(yaml.safe_load(PLATFORM.read_text()) | (changes or {})), "golden"
    )
    plan = plan_run(load_run(example, settings, **resources), platform, "trainyard")
    return dump(merge(render_job(plan, template), platform, plan))


def dump(document: Any) -> str:
    return yaml.safe_dump(document, sort_keys=True, width=10**9)


def chart_platform(helm: str) -> str:
    """`platform.yaml` of the chart's ConfigMap at default values."""
    manifest = subprocess.run(
        [helm, "template", "trainyard", ROOT / "charts/trainyard"]
        + ["--api-versions", "ray.io/v1/RayJob", "--api-versions", "ray.io/v1/RayCluster"]
        + ["--show-only", "templates/platform.yaml"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    text: str = yaml.safe_load(manifest)["data"][CONFIG_MAP_KEY]
    return text


def with_tables(page: str) -> str:
    """Return the text of a page with its generated tables as the registries are today."""
    return TABLE.sub(lambda found: f"{found[1]}\n{TABLES_OF_DOCS[found[2]]()}\n\n{found[4]}", page)


def write() -> None:
    """Rewrite every golden file; files of examples that are gone are removed."""
    helm = shutil.which("helm")
    if helm is None:
        sys.exit("make golden renders the chart: helm must be on PATH")
    operator = module_folder(OPERATOR)
    if operator is None:
        sys.exit(f"make golden reads the CRDs of {OPERATOR}: it must be in Go's module cache")
    KUBERAY_SCHEMA.write_text(kuberay_schema(operator))
    PLATFORM.write_text(chart_platform(helm))
    PAGE.write_text(catalogue_page())
    for page in (ROOT / "docs").rglob("*.md"):
        if (text := page.read_text()) != (table := with_tables(text)):
            page.write_text(table)
    METRICS_PAGE.write_text(metrics_page())
    SCHEMAS.mkdir(exist_ok=True)
    for kind in get_args(Kind):
        text = json.dumps(schema_of(kind), indent=2)
        (SCHEMAS / f"{kind}.schema.json").write_text(f"{text}\n")
    FOLDER.mkdir(exist_ok=True)
    files = expected_files()
    for path in set(FOLDER.glob("*")) - set(files):
        path.unlink()
    for path, render_file in files.items():
        path.write_text(render_file())


if __name__ == "__main__":
    write()
