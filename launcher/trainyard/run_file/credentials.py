"""Plain credentials in a document: a run file goes into the RayJob, the run's folder and its report, where
many may read it. So a credential is named by a Secret, and never written down."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from trainyard.errors import ConfigError

SHAPES: dict[str, str] = {
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a URL with a password": r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@",
    "a signed URL": r"[?&](?:X-Amz-Signature|X-Goog-Signature|sig|access_token|api_key)=[^&\s]{8,}",
    "an AWS access key": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})",
    "a GitLab token": r"\bglpat-[A-Za-z0-9_-]{16,}",
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{20,}",
    "an API key": r"\bsk-[A-Za-z0-9_-]{20,}",
    "a Google API key": r"\bAIza[A-Za-z0-9_-]{35}",
    "a Slack token": r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    "an npm token": r"\bnpm_[A-Za-z0-9]{36}",
    "a Docker token": r"\bdckr_pat_[A-Za-z0-9_-]{20,}",
    "a JSON web token": r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*",
    "a bearer token": r"(?i)\bbearer\s+[A-Za-z0-9._~+/=-]{16,}",
    "an Azure key": r"AccountKey=[A-Za-z0-9+/=]{20,}",
}

SECRET_WORD = (
    r"(?:pass(?:word|wd|phrase)|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|"
    r"secret[_-]?key|credentials?)"
)
SECRET_KEY = re.compile(rf"(?i)(?:.*[_-])?{SECRET_WORD}")
"""A key, or an option of a command line, whose value is a secret: `wandb_api_key`, `--hf-token`."""

ASSIGNED = re.compile(
    rf"(?i)(?:^|[\s,;'\"-])(?:[\w-]*[_-])?{SECRET_WORD}\s*=\s*(?P<value>[^\s,;'\"]+)"
)
REFERENCE = re.compile(r"[$<{/.]|$|(?i:none|null|true|false)$|\d+$")
"""How a value begins that only points to a secret: a variable, a placeholder, a path; or that is none."""

AWS_SECRET = re.compile(
    r"(?=[^A-Z]*[A-Z])(?=[^a-z]*[a-z])(?=[^0-9]*[0-9])(?![0-9a-fA-F]{40}$)[A-Za-z0-9+][A-Za-z0-9/+]{39}"
)
"""40 characters of base64 with capitals, small letters and digits. A path begins with a slash."""


def refuse_credentials(document: Any, source: str) -> None:
    """Raises ConfigError that names each place of a plain credential, and shows none."""
    found = [f"{path}: holds {what}" for path, what in credentials(document)]
    if found:
        count = "a plain credential" if len(found) == 1 else f"{len(found)} plain credentials"
        raise ConfigError(
            f"{source} has {count}",
            *found,
            "It would stand readable in the RayJob, the run's folder and its report.",
            "Put it into a Secret that the chart's values name (storage.s3.secretName), or give the pods' "
            "identity the right.",
        )


def credentials(node: Any, path: str = "", key: str = "") -> Iterator[tuple[str, str]]:
    """Path and kind of each plain credential below a parsed value."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from credentials(name, f"{path}.{name}".lstrip(".") if _is_plain(name) else path)
            yield from credentials(value, f"{path}.{name}".lstrip("."), str(name))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            before = node[index - 1] if index else None
            option = before.lstrip("-") if isinstance(before, str) and before[:1] == "-" else ""
            yield from credentials(value, f"{path}[{index}]", option)
    elif isinstance(node, str) and (what := credential_in(node, key)):
        yield path, what


def credential_in(text: str, key: str = "") -> str | None:
    """What kind of credential a text is, or holds; `key` is what it is the value of."""
    for what, shape in SHAPES.items():
        if re.search(shape, text):
            return what
    if SECRET_KEY.fullmatch(key) and not REFERENCE.match(text) and not text.startswith("-"):
        return f"the value of {key}"
    for found in ASSIGNED.finditer(text):
        if not REFERENCE.match(found["value"]):
            return "a secret that is assigned"
    if any(AWS_SECRET.fullmatch(word) for word in re.split(r"[\s='\",;:()<>{}\[\]]+", text)):
        return "what looks like an AWS secret key"
    return None


def _is_plain(name: Any) -> bool:
    return credential_in(str(name)) is None
