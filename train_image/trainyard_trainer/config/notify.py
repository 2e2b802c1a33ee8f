"""`notify`: where a message goes when a run has ended."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from trainyard_trainer.config.section import Section
from trainyard_trainer.config.variables import SecretKey

NOTIFY_VARIABLE = "TRAINYARD_NOTIFY_URL"
"""The environment variable of the driver with the address of `notify.secret`."""

Outcome = Literal["succeeded", "failed", "stopped"]
"""How a run has ended."""

OUTCOMES: tuple[Outcome, ...] = ("succeeded", "failed", "stopped")

PLAIN_SCHEMES = ("http", "https", "mailto", "mailtos")
"""The schemes of addresses that need no token, and that a run file may hold."""

CHATS = re.compile(
    r"(?i)(?:.*\.)?(?:slack\.com|slack-gov\.com|discord(?:app)?\.com|office\.com|office365\.com|"
    r"logic\.azure\.com|powerplatform\.com|chat\.googleapis\.com|webex\.com|webexapis\.com|telegram\.org)"
)
"""A pattern of hosts whose webhooks have a token in their path."""


def _require_plain_address(url: str) -> str:
    """Refuse what is no address, and addresses that contain a token: everybody can read a run file."""
    secret = "Put the address into a Secret, and name its key in notify.secret"
    try:
        parts = urlsplit(url)
        host, password = parts.hostname, parts.password
    except ValueError:
        parts, host, password = urlsplit(""), None, None
    if not host or not url.isprintable() or " " in url:
        raise PydanticCustomError(
            "notify_url", "must be an address such as https://hooks.example.com/runs"
        )
    if parts.scheme not in PLAIN_SCHEMES:
        raise PydanticCustomError(
            "notify_url",
            "{scheme} is no scheme of notify.url. It may be {known}. Addresses of chats contain a token: "
            + secret,
            {"scheme": parts.scheme, "known": ", ".join(PLAIN_SCHEMES)},
        )
    if password is not None or CHATS.fullmatch(host):
        raise PydanticCustomError(
            "notify_url", "must not contain a password or the token of a chat. " + secret
        )
    return url


class Notify(Section):
    """The receiver of a message when the run has ended: one of `url` and `secret`."""

    url: Annotated[str, AfterValidator(_require_plain_address)] | None = None
    """Address without a password or token, such as `https://hooks.example.com/runs`, which gets a JSON
    document, or `mailto://relay.example.com:25/?from=runs@example.com&to=team@example.com`."""

    secret: SecretKey | None = None
    """Key of a Secret with an address as Apprise takes it, such as that of a Slack or Teams webhook. On this
    machine the address is that of the environment variable `TRAINYARD_NOTIFY_URL`."""

    outcomes: Annotated[tuple[Outcome, ...], Field(strict=False)] = OUTCOMES
    """Outcomes that are reported. `[]` turns messages off, also those of the platform."""

    @model_validator(mode="after")
    def _has_one_address(self) -> Notify:
        if self.url is not None and self.secret is not None:
            raise PydanticCustomError("one_of", "must have one of url and secret, and has both")
        if self.outcomes and self.url is None and self.secret is None:
            raise PydanticCustomError(
                "one_of", "must have url or secret; outcomes: [] turns messages off"
            )
        return self
