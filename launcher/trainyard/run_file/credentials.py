"""Find plain credentials in run files and code.

The run file is stored in the RayJob, in the run's folder and in its report, where many people may read it.
Credentials must therefore be in a Secret.
"""

from __future__ import annotations

import codecs
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
    "an API key": r"\b(?:sk|gsk|xai|r8|nvapi)[-_](?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{20,}",
    "a Databricks token": r"\bdapi[0-9a-f]{32}\b",
    "a PyPI token": r"\bpypi-[A-Za-z0-9_-]{32,}",
    "a key of wandb.login": r"\bwandb\.login\([^)]*key\s*=\s*[\"'][0-9A-Za-z_-]{16,}[\"']",
    "a Slack webhook": r"https://hooks\.slack\.com/services/\w+/\w+/\w{12,}",
    "a Google API key": r"\bAIza[A-Za-z0-9_-]{35}",
    "a Slack token": r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    "an npm token": r"\bnpm_[A-Za-z0-9]{36}",
    "a Docker token": r"\bdckr_pat_[A-Za-z0-9_-]{20,}",
    "a JSON web token": r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*",
    "a bearer token": r"(?i)\bbearer\s+[A-Za-z0-9._~+/=-]{16,}",
    "an Azure key": r"AccountKey=[A-Za-z0-9+/=]{20,}",
}

SECRET_WORD = (
    r"(?:pass(?:word|wd|phrase)|secret|token|credentials?|"
    r"(?:api|access|private|secret|storage|account|encryption|signing)[_-]?key)"
)
SECRET_KEY = re.compile(rf"(?i)(?:.*[_-])?{SECRET_WORD}")
"""A pattern of keys and command line options whose values are secrets: `wandb_api_key`, `--hf-token`."""

ASSIGNED = re.compile(
    rf"(?i)(?:^|[\s,;'\"-])(?P<key>(?:[\w-]*[_-])?{SECRET_WORD})\s*=\s*(?P<value>[^\s,;'\"]+)"
)
REFERENCE = re.compile(
    r"[$<{/.]|$|(?i:none|null|true|false)$|\d+$|\[[^\[\]]*\]$|[^A-Za-z0-9]+$|.*[^\x00-\x7f]"
)
"""A pattern of values that are not secrets: variables, placeholders, paths, tokens such as [MASK]."""

SPECIAL_TOKEN = re.compile(
    r"(?i)(?:.*[_-])?(?:pad|padding|eos|bos|eod|eot|eom|sos|unk|unknown|cls|sep|mask|special|image|video|"
    r"audio|start|end|stop|begin|boi|eoi|blank|newline|prefix|suffix|middle|decoder|placeholder|trigger|"
    r"modifier|think|separator|delimiter|word|first|last)[_-]token"
)
"""A pattern of keys of a tokenizer, whose values are tokens of its vocabulary."""

AWS_SECRET = re.compile(
    r"(?=[^A-Z]*[A-Z])(?=[^a-z]*[a-z])(?=[^0-9]*[0-9])(?![0-9a-fA-F]{40}$)[A-Za-z0-9+][A-Za-z0-9/+]{39}"
)
"""A pattern of 40 characters of base64 with upper case, lower case and digits, but not of paths."""

CREDENTIAL_FILE = re.compile(
    r"(?i)\.env(?:rc)?(?:\.(?!example$|sample$|template$|dist$).*)?|\.netrc|_netrc|\.git-credentials|\.pgpass|"
    r"\.my\.cnf|\.htpasswd|\.vault-token|\.s3cfg|\.boto|\.databrickscfg|\.dockercfg|kaggle\.json|"
    r"id_(?:rsa|dsa|ecdsa|ed25519)(?:_sk)?|.*\.(?:p12|pfx|jks|keystore|kdbx|ppk)|kubeconfig|.*\.kubeconfig"
)
"""A pattern of the names of files for credentials. Templates such as .env.example are ordinary files."""

CREDENTIAL_PATH = re.compile(
    r"/\.aws/credentials$|/\.kube/config$|/\.ssh/(?!.*\.pub$)|/\.azure/|/\.config/gcloud/|/\.gnupg/|"
    r"/\.docker/config\.json$|/\.huggingface/token$|/huggingface/token$|/\.streamlit/secrets\.toml$"
)
"""A pattern of the paths of files for credentials in a home folder."""

SECRETS_FILE = re.compile(
    r"(?i).*\.env|(?:.*[-_.])?(?:secrets?|credentials?)(?:\.(?:ya?ml|json|toml|ini|cfg|conf|txt))?"
)
"""A pattern of the names of files in which a secret may be a short word."""

ENTRY = re.compile(
    rf"(?i)(?P<key>(?<![\w-])(?:[\w-]*[_-])?{SECRET_WORD})[\"']?\s*[:=]\s*[\"']?(?P<value>[^\s\"',}}]+)"
)
"""A pattern of an assigned secret of any length, in a file of `SECRETS_FILE`."""

VAGUE = ("a bearer token",)
"""The kinds of credentials whose patterns also match ordinary text, which has no digits."""

LITERAL = re.compile(
    rf"(?i)(?P<key>(?<![\w-])(?:[\w-]*[_-])?_?{SECRET_WORD})[\"']?\s*(?:=|:)\s*"
    r"(?:(?P<quote>\\?[\"'])(?P<quoted>[A-Za-z0-9_+/=.~-]{16,})(?P=quote)|(?P<bare>[A-Za-z0-9_+/=-]{16,})$)"
)
"""A pattern of an assigned secret, with its value in quotes or at the end of a line."""

PLACEHOLDER = re.compile(
    r"(?i)example\.|your|placeholder|changeme|xxxx|<|\$|\{|:password@|:pass@|:secret@"
)
HINT = re.compile(
    rf"(?i){SECRET_WORD}|-----BEGIN|://[^/\s]*@|AKIA|ASIA|gh[pousr]_|glpat-|hf_|sk-|AIza|xox|npm_|dckr_|eyJ|"
    r"AccountKey|Signature=|sig=|gsk_|xai-|r8_|nvapi-|dapi|pypi-|wandb\.login|hooks\.slack|bearer"
)
"""A pattern that all files with a credential match. Other files are not searched line by line."""

BINARY_LENGTH = 8000
"""The number of first bytes in which a zero byte marks a file as binary, as in git."""


def refuse_credentials(document: Any, source: str) -> None:
    """Raise ConfigError with the path of each plain credential, but not its value."""
    found = [f"{path}: contains {what}" for path, what in credentials(document)]
    if found:
        count = "a plain credential" if len(found) == 1 else f"{len(found)} plain credentials"
        raise ConfigError(
            f"{source} has {count}",
            *found,
            "It would be readable in the RayJob, in the run's folder and in its report.",
            "Put it into a Secret, and name its key in `secrets` of the run file; or grant access to the "
            "identity of the pods' service account.",
        )


def credentials(node: Any, path: str = "", key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and kind of each plain credential in a parsed document."""
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
    """Return the kind of credential that a text contains, or None. `key` is the key of the text."""
    for what, shape in SHAPES.items():
        if re.search(shape, text):
            return what
    is_secret_key = SECRET_KEY.fullmatch(key) and not SPECIAL_TOKEN.fullmatch(key)
    if is_secret_key and not REFERENCE.match(text) and not text.startswith("-"):
        return f"the value of {key}"
    for found in ASSIGNED.finditer(text):
        if not REFERENCE.match(found["value"]) and not SPECIAL_TOKEN.fullmatch(found["key"]):
            return "an assigned secret"
    if any(AWS_SECRET.fullmatch(word) for word in re.split(r"[\s='\",;:()<>{}\[\]]+", text)):
        return "what looks like an AWS secret key"
    return None


def credential_in_file(name: str, content: bytes) -> str | None:
    """Return the kind of credential that a file of code contains, with its line; None if it contains none.

    Files for credentials, such as .env, are recognised by their name. In other text files, only unambiguous
    credentials count, because code contains expressions such as `token = next(tokens)`.
    """
    if CREDENTIAL_FILE.fullmatch(name.rpartition("/")[2]) or CREDENTIAL_PATH.search(f"/{name}"):
        return "is a file for credentials"
    text = _text_of(content)
    if text is None or not HINT.search(text):
        return None
    is_for_secrets = SECRETS_FILE.fullmatch(name.rpartition("/")[2]) is not None
    for number, line in enumerate(text.split("\n"), start=1):
        what = _credential_in_code(line)
        if what is None and is_for_secrets:
            what = _secret_entry(line)
        if what is not None:
            return f"line {number} contains {what}"
    return None


def _text_of(content: bytes) -> str | None:
    """Decode a text file, UTF-8 or UTF-16 with a byte order mark; return None for a binary file."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16", "replace")
    return None if b"\0" in content[:BINARY_LENGTH] else content.decode("utf-8", "replace")


def _credential_in_code(line: str) -> str | None:
    for what, shape in SHAPES.items():
        found = re.search(shape, line)
        is_vague = what in VAGUE and found is not None and not re.search(r"\d", found[0])
        if found is not None and not is_vague and not PLACEHOLDER.search(found[0]):
            return what
    for found in LITERAL.finditer(line):
        value = found["quoted"] or found["bare"]
        is_random = re.search(r"[0-9]", value) and re.search(r"[A-Za-z]", value)
        is_tokenizer = SPECIAL_TOKEN.fullmatch(found["key"])
        if is_random and not is_tokenizer and not PLACEHOLDER.search(value):
            return f"the value of {found['key']}"
    return None


def _secret_entry(line: str) -> str | None:
    """Return the kind of credential that a line of a file of `SECRETS_FILE` assigns, or None."""
    for found in ENTRY.finditer(line):
        value = found["value"]
        is_tokenizer = SPECIAL_TOKEN.fullmatch(found["key"])
        if not (is_tokenizer or REFERENCE.match(value) or PLACEHOLDER.search(value)):
            return f"the value of {found['key']}"
    return None


def _is_plain(name: Any) -> bool:
    return credential_in(str(name)) is None
