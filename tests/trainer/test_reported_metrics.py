"""Metrics of user code as they are recorded."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from trainyard_trainer.user_code.reported_metrics import to_json_values


@pytest.mark.parametrize(
    ("reported", "recorded"),
    [
        (1e-7, 1e-7),
        (2**60, 2**60),
        (np.float32(9), 9.0),
        (np.float16(0.5), 0.5),
        (np.longdouble(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array(4.0), 4.0),
        (np.array([1, 2]), [1, 2]),
        (torch.tensor(1.5, requires_grad=True), 1.5),
        (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
        (torch.tensor(2), 2),
        (torch.tensor(True), True),
        (Decimal("1e-4"), 1e-4),
        (float("nan"), None),
        (np.float64("inf"), None),
        (torch.tensor([1.0, float("-inf")]), [1.0, None]),
        ({1: np.float32(2)}, {"1": 2.0}),
        ("text", "text"),
        (None, None),
        (date(2020, 1, 1), "2020-01-01"),
        (np.datetime64("2020-01-01"), "2020-01-01"),
        (1 + 2j, "(1+2j)"),
        (torch.ones(2000), "torch.float32 (2000,)"),
        (Decimal("sNaN"), None),
        (Fraction(10**400), None),
        (np.uint64(2**63), 2**63),
        (torch.tensor(0.5).to(torch.float8_e4m3fn), 0.5),
        (torch.ones(1, device="meta"), "Tensor torch.float32"),
        (torch.eye(2).to_sparse(), "Tensor torch.float32"),
        (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "Tensor torch.float32"),
    ],
)
def test_a_metric_is_recorded_with_its_type(reported: Any, recorded: Any) -> None:
    found = json.loads(json.dumps(to_json_values({"metric": reported}), allow_nan=False))["metric"]
    assert found == recorded
    assert type(found) is type(recorded)
