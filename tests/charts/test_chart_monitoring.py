"""Metrics that alerts and dashboards ask for exist, and alerts sound when they should."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from tests.charts.crd_schemas import OPERATOR, module_folder
from tests.charts.helm_chart import (
    CHART,
    Object,
    missing,
    need_tool,
    of_kind,
    only,
    platform_of,
    render,
)
from trainyard_trainer.run_folder.measurements.metrics import (
    GAUGE_LABELS,
    METRICS,
    SLOW_WORKER,
    STEP_AGE,
)

NAMESPACE = "team-vision"
DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
RULES_ON = {"monitoring": {"prometheusRule": {"enabled": True}}}
LABELS_OF_PODS = {"namespace", "pod", "ray_io_cluster", "ray_io_node_type", "trainyard_run"}
"""What Prometheus adds to each metric of a pod: its own two, and those of our PodMonitor."""
LABELS_OF_RAYJOBS = {"namespace", "exported_namespace", "name", "deployment_status"}

GAUGES = [*(metric.gauge for metric in METRICS if metric.gauge), STEP_AGE, SLOW_WORKER]


@pytest.fixture(scope="module")
def rules() -> dict[str, Object]:
    (group,) = only(render(RULES_ON), "PrometheusRule")["spec"]["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def panels(dashboard: Path) -> list[Object]:
    return [one for one in json.loads(dashboard.read_text())["panels"] if one["type"] != "row"]


def expressions_of(dashboard: Path) -> list[str]:
    return [target["expr"] for panel in panels(dashboard) for target in panel["targets"]]


def selectors(expression: Any) -> Iterator[Any]:
    """Each choice of a metric in a parsed expression."""
    if isinstance(expression, str):
        expression = promql_parser.parse(expression)
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
    for part in ("expr", "lhs", "rhs", "vector_selector", "param"):
        if (below := getattr(expression, part, None)) is not None:
            yield from selectors(below)
    for argument in getattr(expression, "args", None) or []:
        yield from selectors(argument)


def all_expressions(rules: dict[str, Object]) -> list[str]:
    return [rule["expr"] for rule in rules.values()] + [
        expression for dashboard in DASHBOARDS for expression in expressions_of(dashboard)
    ]


def ray_metrics() -> str:
    """The source in which Ray names the metrics of its nodes."""
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:
        missing("ray is not installed")
    source = Path(spec.origin).parent / "dashboard/modules/reporter/reporter_agent.py"
    return source.read_text()


def operator_metrics() -> str:
    operator = module_folder(OPERATOR)
    if operator is None:
        missing(f"the module {OPERATOR}, which names its metrics, is not in Go's module cache")
    sources = (operator / "controllers/ray/metrics").glob("*.go")
    return "".join(source.read_text() for source in sources)


def test_every_metric_exists(rules):
    names = {one.name for expression in all_expressions(rules) for one in selectors(expression)}
    ours = {f"ray_{gauge.name}" for gauge in GAUGES}
    rays, operators = ray_metrics(), operator_metrics()
    assert len(names & ours) > 12
    for name in names - ours:
        if name.startswith("kuberay_"):
            assert f'"{name}"' in operators, name
        else:
            assert f'"{name.removeprefix("ray_")}"' in rays, name


def test_every_label_exists(rules):
    for expression in all_expressions(rules):
        for one in selectors(expression):
            ours = set(GAUGE_LABELS) if one.name.startswith("ray_trainyard_") else set()
            known = LABELS_OF_RAYJOBS if one.name.startswith("kuberay_") else LABELS_OF_PODS | ours
            assert {matcher.name for matcher in one.matchers.matchers} <= known, expression


def test_every_gauge_of_a_run_is_on_the_dashboard_of_runs():
    text = (CHART / "dashboards/runs.json").read_text()
    assert [gauge.name for gauge in GAUGES if f"ray_{gauge.name}{{" not in text] == [
        "trainyard_samples",  # progress_ratio and samples_per_second tell it better
        *("trainyard_rmse", "trainyard_validation_rmse"),  # of trees alone; the report draws them
    ]


def test_rules_look_at_this_namespace_alone(rules):
    for rule in rules.values():
        for one in selectors(rule["expr"]):
            chosen = {m.value for m in one.matchers.matchers if m.name.endswith("namespace")}
            assert chosen == {NAMESPACE}, rule["alert"]
        assert rule["labels"]["namespace"] == NAMESPACE


def test_an_alert_says_what_is_wrong_and_what_to_do(rules):
    assert len(rules) == 7
    for rule in rules.values():
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert re.search(r"\{\{ \$labels\.(run|name) \}\}", rule["annotations"]["summary"])
        assert rule["annotations"]["description"].endswith(".")
        assert "{{`" not in str(rule["annotations"])


def test_limits_of_alerts_are_values():
    limits = {
        "stuckMinutes": 7,
        "startMinutes": 41,
        "slowRatio": 0.3,
        "dataWaitRatio": 0.7,
        "attemptsPerHour": 5,
    }
    values = {
        "monitoring": {"prometheusRule": {"enabled": True, "labels": {"team": "a"}, **limits}}
    }
    made = only(render(values), "PrometheusRule")
    assert made["metadata"]["labels"]["team"] == "a"
    rules = {rule["alert"]: rule for rule in made["spec"]["groups"][0]["rules"]}
    assert rules["TrainyardRunStuck"]["expr"].endswith("> 420")
    assert rules["TrainyardRunNotStarting"]["for"] == "41m"
    assert "< 0.3 *" in rules["TrainyardRunSlow"]["expr"]
    assert rules["TrainyardRunWaitsForData"]["expr"].endswith("> 0.7")
    assert rules["TrainyardRunStartsOverAgain"]["expr"].endswith(">= 5")


STEP = 'ray_trainyard_step{namespace="team-vision",run="digits",attempt="1"}'
AGE = STEP.replace("step", "step_age_seconds")
SPEED = STEP.replace("step", "samples_per_second")
WAIT = STEP.replace("step", "data_wait_seconds")
BUSY = STEP.replace("step", "step_seconds")
JOB = 'kuberay_job_deployment_status{namespace="team-vision",name="digits-0123abcd",deployment_status="%s"}'
FOREIGN = JOB.replace(
    'namespace="team-vision"', 'namespace="kuberay-system",exported_namespace="team-vision"'
)


def attempt(number: int, values: str) -> dict[str, str]:
    series = f'ray_trainyard_workers{{namespace="team-vision",run="digits",attempt="{number}"}}'
    return {series: values}


ALERTS: dict[str, tuple[str, dict[str, str], str, bool]] = {
    # what happens: (alert, series by minute, when one looks, whether it sounds)
    "no step for half an hour": (
        "TrainyardRunStuck", {STEP: "1+1x10 11x40", AGE: "5x10 0+60x40"}, "35m", True,
    ),
    "no step for half an hour, and no worker that publishes anything": (
        "TrainyardRunStuck", {STEP: "1+1x10 _x40", AGE: "5x10 0+60x40"}, "35m", True,
    ),
    "a step each minute": ("TrainyardRunStuck", {STEP: "1+1x60", AGE: "5x60"}, "35m", False),
    "no step for ten minutes": (
        "TrainyardRunStuck", {STEP: "1+1x20 21x10 22x30", AGE: "5x20 0+60x10 5x30"}, "31m", False,
    ),
    "ended in the middle, and its head still there": (
        "TrainyardRunStuck", {STEP: "1+1x10 _x40", AGE: "5x10 _x40"}, "35m", False,
    ),
    "pods do not start": ("TrainyardRunNotStarting", {JOB % "Initializing": "1x60"}, "40m", True),
    "pods do not start, by a ServiceMonitor that renames": (
        "TrainyardRunNotStarting", {FOREIGN % "Initializing": "1x60"}, "40m", True,
    ),
    "pods start after ten minutes": (
        "TrainyardRunNotStarting",
        {JOB % "Initializing": "1x10 _x50", JOB % "Running": "_x10 1x50"}, "40m", False,
    ),
    "waiting in Kueue": ("TrainyardRunNotStarting", {JOB % "Suspended": "1x60"}, "40m", False),
    "under way without a step": ("TrainyardRunSilent", {JOB % "Running": "1x60"}, "40m", True),
    "under way with steps": (
        "TrainyardRunSilent", {JOB % "Running": "1x60", AGE: "_x2 5x60"}, "40m", False,
    ),
    "under way with steps, and now stuck": (
        "TrainyardRunSilent", {JOB % "Running": "1x90", AGE: "5x10 0+60x80"}, "60m", False,
    ),
    "a third of its speed": ("TrainyardRunSlow", {SPEED: "900x30 300x60"}, "60m", True),
    "a dip of five minutes": ("TrainyardRunSlow", {SPEED: "900x30 300x5 900x40"}, "60m", False),
    "workers wait for data": ("TrainyardRunWaitsForData", {WAIT: "0.9x60", BUSY: "0.1x60"}, "30m", True),
    "workers compute": ("TrainyardRunWaitsForData", {WAIT: "0.1x60", BUSY: "0.9x60"}, "30m", False),
    "just failed": ("TrainyardRunFailed", {JOB % "Failed": "_x10 1x60"}, "20m", True),
    "just failed, renamed": ("TrainyardRunFailed", {FOREIGN % "Failed": "_x10 1x60"}, "20m", True),
    "failed an hour ago": ("TrainyardRunFailed", {JOB % "Failed": "1x90"}, "60m", False),
    "succeeded": ("TrainyardRunFailed", {JOB % "Complete": "_x10 1x60"}, "20m", False),
    "three attempts": (
        "TrainyardRunStartsOverAgain",
        attempt(1, "2x9 _x40") | attempt(2, "_x10 2x9 _x40") | attempt(3, "_x20 2x40"), "30m", True,
    ),
    "two attempts": (
        "TrainyardRunStartsOverAgain", attempt(1, "2x9 _x40") | attempt(2, "_x10 2x40"), "30m", False,
    ),
}  # fmt: skip


def test_alerts_sound_when_they_should(rules, tmp_path):
    """Prometheus' own tool decides."""
    promtool = need_tool("promtool")
    (tmp_path / "rules.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "runs", "rules": list(rules.values())}]})
    )
    tests = [
        {
            "name": what,
            "interval": "1m",
            "input_series": [{"series": key, "values": value} for key, value in series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)',
                    "eval_time": when,
                    "exp_samples": [{"labels": "{}", "value": int(sounds)}],
                }
            ],
        }
        for what, (alert, series, when, sounds) in ALERTS.items()
    ]
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests})
    )
    ended = subprocess.run(
        [promtool, "test", "rules", "tests.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert {alert for alert, *_ in ALERTS.values()} == set(rules)


def test_the_monitor_finds_heads_and_workers_and_nothing_else():
    values = {"monitoring": {"podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}}}
    objects = render(values)
    monitor = only(objects, "PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    selector = monitor["spec"]["selector"]
    template = platform_of(objects)["rayClusterSpec"]["headGroupSpec"]["template"]
    assert selector["matchLabels"].items() <= template["metadata"]["labels"].items()
    (kinds,) = selector["matchExpressions"]
    # The operator puts this label on the pods of Ray; reader and probes have none.
    assert (kinds["key"], kinds["values"]) == ("ray.io/node-type", ["head", "worker"])
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    ports = template["spec"]["containers"][0]["ports"]
    assert endpoint["port"] in [port["name"] for port in ports]
    added = {one["targetLabel"] for one in endpoint["relabelings"]}
    assert added | {"namespace", "pod"} == LABELS_OF_PODS


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_reaches_grafana_whole(dashboard):
    found = of_kind(render({"monitoring": {"dashboards": {"enabled": True}}}), "ConfigMap")
    config_map = found[f"trainyard-dashboard-{dashboard.stem}"]
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    (text,) = config_map["data"].values()
    assert json.loads(text) == json.loads(dashboard.read_text())


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_in_order(dashboard):
    board = json.loads(dashboard.read_text())
    assert board["uid"] == f"trainyard-{dashboard.stem}"
    variables = {f"${one['name']}" for one in board["templating"]["list"]}
    used = set(re.findall(r"\$(?!\{|__)\w+", json.dumps(board["panels"])))
    assert used <= variables
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    for panel in panels(dashboard):
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])
