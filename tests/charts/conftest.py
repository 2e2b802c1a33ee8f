"""The renderings that many tests look at, made once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.helm_chart import S3_STORAGE, platform_of, render


@pytest.fixture(scope="session")
def on_claim() -> list[dict[str, Any]]:
    """Default values, and the standing cluster."""
    return render({"rayCluster": {"enabled": True}})


@pytest.fixture(scope="session")
def on_s3() -> list[dict[str, Any]]:
    return render({"rayCluster": {"enabled": True}, "storage": S3_STORAGE})


@pytest.fixture(scope="session", params=["on_claim", "on_s3"])
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Each kind of storage in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def platform(on_claim: list[dict[str, Any]]) -> dict[str, Any]:
    """What the launcher reads; parsed anew, so a test may take it apart."""
    return platform_of(on_claim)
