"""`labels` and `annotations` of a run file: the syntax of Kubernetes, and the keys that belong to others."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, StringConstraints
from pydantic_core import PydanticCustomError

KEY = re.compile(
    r"(?:(?P<prefix>[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*)/)?"
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)"
)
"""The key of a label or an annotation."""

PREFIX_LIMIT = 253
"""The largest number of characters of a key's prefix."""

ANNOTATIONS_LIMIT = 32 * 2**10
"""The largest size of all annotations together, in bytes: the driver gets them in an environment variable."""

RESERVED_DOMAINS = (
    *("trainyard.io", "ray.io", "kubernetes.io", "k8s.io", "x-k8s.io", "helm.sh"),
    *("volcano.sh", "yunikorn.apache.org", "kai.scheduler", "run.ai", "runai"),
)
"""Domains, with their subdomains, of the keys of trainyard, Ray, Kubernetes, Helm and the queue systems."""

RESERVED_NAMES = ("queue", "applicationId")
"""Keys without a prefix that YuniKorn reads."""


def is_reserved(key: str) -> bool:
    """Return whether the key belongs to trainyard, Ray, Kubernetes, Helm or a queue system."""
    prefix, slash, _ = key.rpartition("/")
    if not slash:
        return key in RESERVED_NAMES
    return any(f".{prefix}".endswith(f".{domain}") for domain in RESERVED_DOMAINS)


def _require_key(key: str) -> str:
    found = KEY.fullmatch(key)
    if found is None or len(found["prefix"] or "") > PREFIX_LIMIT:
        raise PydanticCustomError(
            "key",
            "must be NAME or DOMAIN/NAME: NAME has at most 63 letters, digits, dashes, dots and underscores, "
            "DOMAIN is in lower case",
        )
    if is_reserved(key):
        raise PydanticCustomError(
            "reserved",
            "must be another key: this one belongs to trainyard, Ray, Kubernetes, Helm or a queue system",
        )
    return key


def _require_size(annotations: dict[str, str]) -> dict[str, str]:
    size = sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items())
    if size > ANNOTATIONS_LIMIT:
        raise PydanticCustomError(
            "size",
            "must have at most {limit} bytes together, and have {size}",
            {"limit": ANNOTATIONS_LIMIT, "size": size},
        )
    return annotations


Key = Annotated[str, AfterValidator(_require_key)]

LabelValue = Annotated[
    str,
    StringConstraints(pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?$", max_length=63),
]
"""The value of a label."""

Labels = dict[Key, LabelValue]
"""Labels that a run file sets."""

Annotations = Annotated[dict[Key, str], AfterValidator(_require_size)]
"""Annotations that a run file sets."""
