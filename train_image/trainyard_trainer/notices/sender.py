"""Send a message with Apprise, within a bounded time, and without the address in any output."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from trainyard_trainer.notices.message import Message

LIMIT_S = 12.0
"""Seconds that sending may take, over all addresses."""

REQUEST_S = 5.0
"""Seconds in which a receiver must accept a connection, and once more in which it must answer."""

NATIVE = {"http": "json", "https": "jsons"}
"""Apprise's schemes for a webhook that gets a JSON document."""

STATUS = re.compile(r"error=(\d{3})\b")
"""The HTTP status in what Apprise logs."""


def send(addresses: str, message: Message, *, limit_s: float = LIMIT_S) -> str | None:
    """Send a message to addresses that are separated by white space.

    Return why it was not delivered to all of them; None if it was. Never raises, and takes `limit_s` at most.
    """
    found: list[str | None] = ["it has not answered in time"]

    def work() -> None:
        try:
            found[0] = _send(addresses.split(), message)
        except Exception as error:  # noqa: BLE001 - of any service, and it may hold the address
            found[0] = f"{type(error).__name__} while sending"

    thread = threading.Thread(target=work, name="notify", daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[0]


def _send(addresses: list[str], message: Message) -> str | None:
    """Send a message, and return why some receiver has not got it."""
    import apprise  # lazy: a second, and only at the end of a run that has a receiver

    if not addresses:
        return "there is no address"
    kinds: Mapping[str, Any] = {
        "succeeded": apprise.NotifyType.SUCCESS,
        "failed": apprise.NotifyType.FAILURE,
        "stopped": apprise.NotifyType.WARNING,
    }
    problems = []
    for address in addresses:
        service = apprise.Apprise.instantiate(_timed(address)) or apprise.Apprise.instantiate(
            _timed(webhook_address(address, message.facts))
        )
        scheme = address.partition(":")[0]
        if service is None:
            problems.append(
                f"it is no address that Apprise {apprise.__version__} knows; its scheme is {scheme[:20]!r}"
            )
            continue
        receivers = apprise.Apprise()
        receivers.add(service)
        with _QuietLog() as lines:
            is_sent = receivers.notify(
                body=message.body, title=message.title, notify_type=kinds[message.outcome]
            )
        if not is_sent:
            status = next((found[1] for line in lines if (found := STATUS.search(line))), None)
            answer = f"answered {status}" if status else "did not accept it, or cannot be reached"
            problems.append(f"the receiver ({scheme}) {answer}")
    return "; ".join(problems) or None


def webhook_address(address: str, facts: Mapping[str, str]) -> str:
    """Return Apprise's address of a webhook at an http or https URL; any other address as it is.

    The document gets the facts too. The parameters of the URL stay parameters.
    """
    parts = urlsplit(address)
    if parts.scheme not in NATIVE:
        return address
    own = [(f"-{name}", value) for name, value in parse_qsl(parts.query, keep_blank_values=True)]
    more = [(f":{name}", value) for name, value in facts.items()]
    query = urlencode(own + more, quote_via=quote)
    return parts._replace(scheme=NATIVE[parts.scheme], query=query, fragment="").geturl()


def _timed(address: str) -> str:
    """Return an address with the time limits of a request."""
    sign = "&" if "?" in address else "?"
    return f"{address}{sign}cto={REQUEST_S:g}&rto={REQUEST_S:g}"


class _QuietLog(logging.Handler):
    """Keeps what Apprise logs within a block out of the output, because it may contain the address."""

    def __enter__(self) -> list[str]:
        self.lines: list[str] = []
        self.logger = logging.getLogger("apprise")
        self.logger.addHandler(self)
        self.propagates, self.logger.propagate = self.logger.propagate, False
        return self.lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __exit__(self, *error: object) -> None:
        self.logger.removeHandler(self)
        self.logger.propagate = self.propagates
