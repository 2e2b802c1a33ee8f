"""`train.fsdp2` and `train.deepspeed`: the settings of the strategies that shard a model over workers."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from trainyard_trainer.config.section import Section


class Fsdp2Config(Section):
    """How `strategy: fsdp2` shares a model out over workers."""

    reshard_after_forward: bool = True
    """Give gathered weights up between the forward and the backward pass: less memory, and one exchange
    more."""

    param_dtype: Literal["fp32", "bf16"] = "fp32"
    """Numbers that weights are gathered and computed in; each worker keeps its share in fp32."""

    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Numbers that gradients are added up in."""

    cpu_offload: bool = False
    """Keep weights, gradients and optimiser in host memory, and each on the GPU only while it is needed."""


class DeepSpeedConfig(Section):
    """How `strategy: deepspeed` shares a model out over workers (its ZeRO)."""

    stage: Literal[1, 2, 3] = 3
    """What each worker keeps a share of alone: 1 the optimiser, 2 gradients, too, 3 weights, too."""

    offload: Literal["none", "optimizer", "all"] = "none"
    """What is kept in host memory: nothing, the optimiser, or with stage 3 the weights, too."""

    @model_validator(mode="after")
    def _offloads_what_is_shared_out(self) -> DeepSpeedConfig:
        if self.offload == "all" and self.stage != 3:
            raise PydanticCustomError(
                "strategy",
                f"offload = all needs stage 3, which shares weights out; with {self.stage} use optimizer",
            )
        return self
