"""Locations: a path of this machine or `s3://bucket/prefix`; of models `hf://org/name`, too. No other URL is
read or written."""

from __future__ import annotations

import re

S3 = "s3://"
HUB = "hf://"
HUB_MODEL = re.compile(rf"{HUB}(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^@\s]+))?")
"""The address of a model on the Hugging Face Hub; without a revision it is that of `main`."""
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""How a URL begins. `Path` makes one slash of two, so one is enough: s3:/bucket is no folder either."""
ADDRESS = re.compile(r"https?://[^/\s?#]+/?")


def location_problem(location: str) -> str | None:
    """Return what is wrong with a location, in words that follow its name and value; None if it is valid."""
    if location.startswith(S3):
        has_bucket = bool(location.removeprefix(S3).partition("/")[0])
        return None if has_bucket else "names no bucket: write s3://bucket/prefix"
    return "is neither a folder nor s3://bucket/prefix" if URL.match(location) else None


def local_problem(location: str) -> str | None:
    """Return what is wrong with the path of a file or folder of this machine; None if it is valid."""
    return "must be a path of this machine, not a URL" if URL.match(location) else None


def model_problem(location: str) -> str | None:
    """Return what is wrong with the location of a model; None if it is valid."""
    if location.startswith(HUB):
        is_valid = HUB_MODEL.fullmatch(location)
        return None if is_valid else "names no model: write hf://org/name or hf://org/name@revision"
    problem = location_problem(location)
    is_other_url = problem is not None and not location.startswith(S3)
    return (
        "is neither a folder nor s3://bucket/prefix nor hf://org/name" if is_other_url else problem
    )


def is_remote(location: str) -> bool:
    """Whether the location of a model is outside of this machine."""
    return location.startswith((S3, HUB))


def endpoint_problem(endpoint: str) -> str | None:
    """Return what is wrong with the address of an S3 server; None if it is valid."""
    if ADDRESS.fullmatch(endpoint):
        return None
    return "is not an address: write it as http://HOST:PORT or https://HOST:PORT"
