"""Values that nobody would write: taken, or refused with a sentence, and never a template's own error."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.charts.helm_chart import ALL_APIS, CHART, of_kind, run_helm
from tests.charts.kubernetes_versions import VERSIONS, is_known, problems
from tests.charts.test_chart_matrix import FACTORS, values_of
from trainyard.platform import parse_platform

DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
Path = tuple[str, ...]
OF_KUBERNETES = {("pod", key) for key in DEFAULTS["pod"]} - {
    ("pod", key)
    for key in ("env", "priorityClassName", "runtimeClassName", "schedulerName", "resources")
}


def paths(node: Any, path: Path = ()) -> Iterator[Path]:
    """Each key of the values, of sections too; but not what has Kubernetes' own structure, which helm
    does not check."""
    if isinstance(node, dict):
        for key, value in node.items():
            if (*path, key) not in OF_KUBERNETES:
                yield (*path, key)
            yield from paths(value, (*path, key))


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.floats(-1, 9, allow_nan=False),
    st.sampled_from(["", "a", "gpu", "kueue", "1", "9Gi", "s3://b", "{{ .Values }}", "a\nb: c", "ä"]),
)  # fmt: skip
ANYTHING = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=2),
    st.dictionaries(st.sampled_from(["name", "gpu", "cpu", "enabled", "x"]), SCALARS, max_size=2),
)
MIXTURES = st.fixed_dictionaries(
    {name: st.integers(0, len(choices) - 1) for name, choices in FACTORS.items()}
)
CHANGES = st.lists(st.tuples(st.sampled_from([*paths(DEFAULTS)]), ANYTHING), max_size=3)


def changed(values: dict[str, Any], changes: list[tuple[Path, Any]]) -> dict[str, Any]:
    values = copy.deepcopy(values)
    for (*sections, key), value in changes:
        place = values
        for section in sections:
            if not isinstance(place.get(section), dict):
                place[section] = {}
            place = place[section]
        place[key] = value
    return values


# Each example starts helm.
@settings(max_examples=settings().max_examples * 2 // 5, derandomize=True)
@given(mixture=MIXTURES, changes=CHANGES)
def test_values_render_to_valid_objects_or_are_refused_with_a_sentence(
    mixture: dict[str, int], changes: list[tuple[Path, Any]]
) -> None:
    values = changed(values_of(mixture), changes)
    rendered = run_helm(values, ALL_APIS)
    if rendered.returncode != 0:
        is_schemas = "values don't meet the specifications of the schema" in rendered.stderr
        is_ours = rendered.stderr.startswith("Error: execution error at (trainyard/templates/")
        assert is_schemas or is_ours, rendered.stderr
        return
    objects = [one for one in yaml.safe_load_all(rendered.stdout) if one]
    for one in objects:
        assert not is_known(one) or problems(one, VERSIONS[-1]) == []
    published = of_kind(objects, "ConfigMap")["trainyard-platform"]["data"]["platform.yaml"]
    parse_platform(published, "test")
