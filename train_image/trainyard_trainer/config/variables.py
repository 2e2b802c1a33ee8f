"""`env` and `secrets`: environment variables of a run."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, StringConstraints
from pydantic_core import PydanticCustomError

from trainyard_trainer.config.section import Section

RESERVED = re.compile(
    r"(?:RAY|TRAINYARD|TORCHELASTIC)_.*|PYTHONHOME|PYTHONPATH|MASTER_ADDR|MASTER_PORT|"
    r"(?:LOCAL_|GROUP_|ROLE_)?RANK|(?:LOCAL_|ROLE_)?WORLD_SIZE"
)
"""Names of variables that no run file may set, on any machine."""

REFERENCE = re.compile(r"\$(?:\w|\{)", re.ASCII)
"""A reference to another variable in a value."""


def _require_free_name(name: str) -> str:
    """Refuse the names of variables by which trainyard and Ray work, or that replace Python modules."""
    if RESERVED.fullmatch(name):
        raise PydanticCustomError(
            "reserved",
            "must be another name: RAY_*, TRAINYARD_*, the variables of torchrun, PYTHONHOME and PYTHONPATH "
            "are set for each process",
        )
    return name


def _require_plain_value(value: str) -> str:
    """Refuse a value that would be another one in some of the run's processes.

    Ray replaces references to variables in what it sets for workers, and knows no way to escape them. The
    operating system ends a value at a NUL character.
    """
    if REFERENCE.search(value):
        raise PydanticCustomError(
            "reference",
            "must not refer to another variable as $NAME or ${NAME}: write its value",
        )
    if "\0" in value:
        raise PydanticCustomError("nul", "must not contain a NUL character")
    return value


VariableName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=253),
    AfterValidator(_require_free_name),
]
"""The name of an environment variable that a run file may set."""

Variables = dict[VariableName, Annotated[str, AfterValidator(_require_plain_value)]]
"""Environment variables: the value of each by its name."""

SecretName = Annotated[
    str,
    StringConstraints(
        pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$", max_length=253
    ),
]
"""The name of a Secret of Kubernetes."""


class SecretKey(Section):
    """A key of a Secret, whose value a variable gets."""

    name: SecretName
    """Name of the Secret, in the namespace of the run."""

    key: Annotated[
        str,
        StringConstraints(pattern=r"^[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*$", max_length=253),
    ]
    """Key in the Secret, whose value the variable gets."""


Secrets = dict[VariableName, SecretKey]
"""Environment variables: the Secret and the key that each gets its value from, by its name."""
