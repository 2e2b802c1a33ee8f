"""Environment variables of training libraries that trainyard sets for the user's code.

trainyard sets a variable only if neither the run file's `env` nor the environment in which the run was
started sets it. `make golden` generates the table in docs/guides/libraries.md from `VARIABLES`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

When = Literal["always", "without GPUs", "torchrun", "read-only home"]
"""The condition under which a variable is set."""


@dataclass(frozen=True, slots=True)
class LibraryVariable:
    """An environment variable that a training library reads."""

    name: str
    value: str
    """The value. Names in braces are replaced, see `library_variables`."""
    when: When
    effect: str
    """The effect of the value, as a sentence for the documentation."""


VARIABLES = (
    LibraryVariable(
        *("ACCELERATE_USE_CPU", "true", "without GPUs"),
        "Transformers, TRL and Accelerate join the process group on CPUs. Otherwise each worker trains "
        "a model of its own.",
    ),
    LibraryVariable(
        *("PL_TRAINER_ACCELERATOR", "cpu", "without GPUs"),
        "Lightning trains on CPUs, unless the script passes `accelerator`.",
    ),
    LibraryVariable(
        *("PL_TRAINER_DEVICES", "{workers_per_node}", "torchrun"),
        "Lightning uses all workers of a node, unless the script passes `devices`. Otherwise each "
        "worker on a CPU trains a model of its own.",
    ),
    LibraryVariable(
        *("PL_TRAINER_NUM_NODES", "{nodes}", "torchrun"),
        "Lightning uses all nodes, unless the script passes `num_nodes`.",
    ),
    LibraryVariable(
        *("OMP_NUM_THREADS", "{cpus_per_worker}", "torchrun"),
        "Each worker computes with as many threads as it has CPUs.",
    ),
    LibraryVariable(
        *("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1", "torchrun"),
        "Restarted workers do not read the addresses of the workers before them, which made restarts hang.",
    ),
    LibraryVariable(
        *("HF_HOME", "{tmp}/huggingface", "read-only home"),
        "Hugging Face libraries have a folder that they can write to. By default it is in the home folder.",
    ),
    LibraryVariable(
        *("HF_HUB_OFFLINE", "1", "always"),
        "Nothing is downloaded from the Hugging Face Hub. A missing model is reported at once.",
    ),
    LibraryVariable(
        *("HF_HUB_DISABLE_TELEMETRY", "1", "always"),
        "Hugging Face libraries send no usage data.",
    ),
    LibraryVariable(
        *("TOKENIZERS_PARALLELISM", "false", "always"),
        "Tokenizers start no threads, which would warn in each data loading process.",
    ),
    LibraryVariable(
        *("RAY_TRAIN_ENABLE_PRINT_PATCH", "0", "always"),
        "Ray Train does not print each line of a worker twice.",
    ),
    LibraryVariable(
        *("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1", "always"),
        "The `runtime_env` that a script passes to `ray.init` takes precedence over trainyard's.",
    ),
)


def library_variables(
    conditions: Collection[When], environment: Mapping[str, str], values: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that apply under these conditions and that the environment does not set yet.

    `values` are the values of the placeholders in braces.
    """
    return {
        variable.name: variable.value.format_map(values)
        for variable in VARIABLES
        if variable.when in conditions and variable.name not in environment
    }


def table() -> str:
    """Return the registry as a Markdown table."""
    rows = [
        f"| `{each.name}` | `{each.value}` | {each.when} | {each.effect} |" for each in VARIABLES
    ]
    return "\n".join(["| variable | value | set | effect |", "|---|---|---|---|", *rows])
