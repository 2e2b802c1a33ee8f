"""What nobody would think of: random run files, settings and numbers end in a plan or in a clear refusal."""

from __future__ import annotations

import copy
import re
from contextlib import suppress
from fractions import Fraction
from typing import Any

import pytest
import yaml
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.launcher.random_runs import (
    DIGITS,
    EXAMPLE,
    PATHS,
    PLATFORM,
    Made,
    documents,
    plausible,
    values,
)
from trainyard.errors import ConfigError
from trainyard.planning.merge import merge
from trainyard.planning.plan import Plan, plan_run
from trainyard.planning.render import render_job
from trainyard.platform import Platform
from trainyard.quantities import quantity
from trainyard.rules import check
from trainyard.run_file.load import load_run
from trainyard.run_file.models import RecipeRun
from trainyard.run_file.validation import validate
from trainyard.run_file.yaml_text import parse_mapping

often = settings(max_examples=2 * settings().max_examples)


def digits(resources: dict[str, Any], **train: int) -> RecipeRun:
    document = copy.deepcopy(DIGITS)
    document["resources"] = resources
    document["train"] |= train
    return validate(RecipeRun, document, "test")


def planned(run: RecipeRun, platform: Platform) -> Plan | str:
    """The plan of a run, or the words of the refusal."""
    try:
        return plan_run(run, platform, "team")
    except ConfigError as error:
        return str(error)


def rendered(run: RecipeRun, platform: Platform) -> Plan:
    """The plan of a run whose objects can be written, read again and sent: they break no rule of KubeRay."""
    plan = plan_run(run, platform, "team")
    job = merge(render_job(plan), platform, plan)
    assert yaml.safe_load(yaml.safe_dump(job)) == job
    findings = check.check(job, platform.kuberay, platform.ray_version)
    assert [str(finding) for finding in findings if finding.severity == "error"] == []
    return plan


@st.composite
def platforms(draw: st.DrawFn) -> Platform:
    """The packaged platform with a GPU pool of any shape."""
    pool = PLATFORM.pool("gpu").model_copy(
        update={
            "gpus_per_node": draw(st.integers(1, 16)),
            "cpus": draw(st.integers(1, 256)) / draw(st.sampled_from([1, 2, 4])),
            "memory_gib": draw(st.integers(1, 4096)),
        }
    )
    return PLATFORM.model_copy(update={"pools": (PLATFORM.pool("cpu"), pool)})


# A batch that many numbers of workers divide, or any.
batches = st.one_of(
    st.integers(1, 20_000), st.integers(0, 13).map(lambda power: 2**power * 3), st.just(2**13 * 45)
)


def neighbours(message: str) -> list[int]:
    found = re.search(r"Use ([\d or]+) (?:GPUs?|workers?) with train\.global_batch_size", message)
    return [int(number) for number in found[1].split(" or ")] if found else []


@often
@given(gpus=st.integers(1, 8192), batch=batches, platform=platforms())
def test_a_number_is_exact_or_the_next_ones_are(gpus: int, batch: int, platform: Platform) -> None:
    plan = planned(digits({"gpus": gpus}, global_batch_size=batch), platform)
    if isinstance(plan, Plan):
        assert plan.gpus == plan.workers == plan.nodes * plan.workers_per_node == gpus
        return
    near = neighbours(plan)
    assert near or "No number is possible" in plan
    for number in near:
        run = digits({"gpus": number}, global_batch_size=batch)
        assert plan_run(run, platform, "team").gpus == number
    # Nothing between the number and its neighbours is possible.
    below = [number for number in near if number < gpus]
    above = [number for number in near if number > gpus]
    assert (len(below) <= 1, len(above) <= 1) == (True, True)
    between = range(max(below, default=0) + 1, min(above, default=min(batch, 8192) + 1))
    for number in [number for number in between if batch % number == 0][:20]:
        run = digits({"gpus": number}, global_batch_size=batch)
        assert isinstance(planned(run, platform), str)


@often
@given(low=st.integers(1, 300), more=st.integers(1, 300), batch=batches, platform=platforms())
def test_a_range_is_exact_at_each_size_or_possible_ones_are_named(
    low: int, more: int, batch: int, platform: Platform
) -> None:
    run = digits({"gpus": {"min": low, "max": low + more}}, global_batch_size=batch)
    plan = planned(run, platform)
    if isinstance(plan, str):
        assert "Possible sizes" in plan
        for text in re.findall(r"\b(\d+:\d+)\b", plan):
            least, most = (int(end) for end in text.split(":"))
            possible = digits({"gpus": {"min": least, "max": most}}, global_batch_size=batch)
            assert plan_run(possible, platform, "team").is_elastic
        return
    sizes = plan.trainer.scaling.sizes
    assert (sizes[0], sizes[-1]) == (low, low + more)
    assert all(batch % size == 0 for size in sizes)


@often
@given(gpus=st.integers(1, 8192), platform=platforms())
def test_sizes_of_pods_never_exceed_the_pools(gpus: int, platform: Platform) -> None:
    plan = planned(digits({"gpus": gpus}, global_batch_size=gpus), platform)
    if isinstance(plan, str):
        return
    pool = platform.pool("gpu")
    assert 0 < plan.node.memory_mib <= pool.memory_gib * 1024
    assert plan.node.object_store_mib < plan.node.memory_mib
    assert plan.workers_per_node * plan.cpus_per_worker < plan.node.logical_cpus
    assert plan.node.cpu_limit_milli <= round(pool.cpus * 1000)


@often
@given(made=plausible())
def test_what_makes_sense_alone_makes_sense_together_or_is_refused(made: Made) -> None:
    document, platform = made
    try:
        plan = rendered(validate(RecipeRun, document, "test"), platform)
    except ConfigError as error:
        event(f"refused: {error.what.split(' =')[0]}")
    else:
        event("rendered")
        assert (plan.data is not None) == ("data" in document["resources"])


@often
@given(document=documents())
def test_a_random_run_file_is_planned_and_rendered_or_refused(document: dict[str, Any]) -> None:
    with suppress(ConfigError):
        rendered(validate(RecipeRun, document, "test"), PLATFORM)


@often
@given(text=st.one_of(st.text(max_size=200), values.map(lambda value: yaml.safe_dump(value))))
def test_a_random_text_is_a_run_or_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        validate(RecipeRun, parse_mapping(text, "test"), "test")


@often
@given(
    path=st.sampled_from(PATHS["digits"]).map(".".join),
    value=st.one_of(st.text(max_size=30), st.sampled_from(["1", "{a: 1}", "[", "8:16", "null"])),
)
def test_a_random_setting_is_taken_or_refused(path: str, value: str) -> None:
    with suppress(ConfigError):
        rendered(load_run(EXAMPLE, [f"{path}={value}"]), PLATFORM)


@often
@given(
    text=st.one_of(
        st.text(max_size=12),
        st.integers().map(str),
        st.from_regex(r"\d{1,5}:\d{1,5}", fullmatch=True),
        st.from_regex(r"\d{1,5}", fullmatch=True),
    )
)
def test_a_random_number_of_gpus_is_exact_or_refused(text: str) -> None:
    try:
        plan = rendered(load_run(EXAMPLE, gpus=text), PLATFORM)
    except ConfigError:
        return
    low, _, high = text.partition(":")
    assert (plan.min_nodes * plan.workers_per_node, plan.gpus) == (int(low), int(high or low))


@often
@given(
    number=st.decimals(
        allow_nan=False, allow_infinity=False, places=6, min_value=0, max_value=10**9
    ),
    suffix=st.sampled_from(["", "m", "k", "Ki", "M", "Mi", "G", "Gi", "T", "Ti"]),
)
def test_a_quantity_is_its_number_times_its_suffix(number: Any, suffix: str) -> None:
    size = {"": 1, "m": Fraction(1, 1000), "k": 1000, "M": 10**6, "G": 10**9, "T": 10**12}
    size |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    assert quantity(f"{number:f}{suffix}") == Fraction(number) * size[suffix]
