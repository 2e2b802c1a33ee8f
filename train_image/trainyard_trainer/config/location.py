"""Locations: a path of this machine or `s3://bucket/prefix`. No other URL is read or written."""

from __future__ import annotations

import re

S3 = "s3://"
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


def endpoint_problem(endpoint: str) -> str | None:
    """Return what is wrong with the address of an S3 server; None if it is valid."""
    if ADDRESS.fullmatch(endpoint):
        return None
    return "is not an address: write it as http://HOST:PORT or https://HOST:PORT"
