"""Run the program with which a kubeconfig logs in (an exec credential plugin), as kubectl does."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

from trainyard.cluster.kubeconfig import EXEC_EXTENSION, ExecConfig, KubeCluster
from trainyard.errors import ClusterUnreachable

Object = dict[str, Any]

GROUP = "client.authentication.k8s.io"
VERSIONS = (f"{GROUP}/v1", f"{GROUP}/v1beta1")
MODES = ("Never", "IfAvailable", "Always")
LIMIT_S = 30.0
"""Timeout in seconds for a program that can ask nobody."""
INTERACTIVE_LIMIT_S = 300.0
"""Timeout in seconds for a program that may ask on the terminal."""
NOTICE_S = 5.0
"""After how many seconds the launcher says what it waits for."""
LINES_SHOWN = 5
"""How many lines from the end of the program's standard error an error message repeats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Credential:
    """What an exec plugin has printed: a token, a client certificate, or both."""

    token: str = ""
    certificate: str = ""
    key: str = ""
    expires: datetime | None = None

    def is_expired(self) -> bool:
        """Return whether the program must be run again."""
        return self.expires is not None and datetime.now(timezone.utc) >= self.expires


class ExecPlugin:
    """The login program of one user of a kubeconfig."""

    def __init__(self, config: ExecConfig, cluster: KubeCluster, user: str) -> None:
        self._config = config
        self._cluster = cluster
        self._what = f"the kubeconfig's login program {config.command}"
        self._lock = threading.Lock()
        self._credential: Credential | None = None
        self._check(user)

    def credential(self) -> Credential:
        """Return the present credential; run the program if there is none, or if it has expired."""
        with self._lock:
            if self._credential is None or self._credential.is_expired():
                self._credential = self._run()
            return self._credential

    def renew(self, refused: Credential) -> Credential:
        """Run the program again, unless another thread has replaced the refused credential already."""
        with self._lock:
            if self._credential is refused:
                self._credential = self._run()
            assert self._credential is not None
            return self._credential

    def _check(self, user: str) -> None:
        """Raise ClusterUnreachable if the kubeconfig describes the program wrongly."""
        config = self._config
        modes = ("", *MODES) if config.api_version == VERSIONS[1] else MODES
        for key, value, allowed in (
            ("apiVersion", config.api_version, VERSIONS),
            ("interactiveMode", config.interactive_mode, modes),
        ):
            if value not in allowed:
                raise ClusterUnreachable(
                    f"user {user} of the kubeconfig: exec.{key} = {value!r}: must be "
                    f"{' or '.join(each for each in allowed if each)}"
                )
        if not config.command:
            raise ClusterUnreachable(f"user {user} of the kubeconfig: exec.command is missing")

    def _run(self) -> Credential:
        is_interactive = self._is_interactive()
        program = shutil.which(self._config.command)
        if program is None or not Path(program).is_absolute():
            self._fail("is not installed, or not on PATH")
        environment = os.environ | {each.name: each.value for each in self._config.env}
        environment["KUBERNETES_EXEC_INFO"] = json.dumps(self._request(is_interactive))
        try:
            process = subprocess.Popen(
                [self._config.command, *self._config.args],
                executable=program,
                env=environment,
                stdin=None if is_interactive else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=None if is_interactive else subprocess.PIPE,
                # Its own session, so that everything that it starts can be killed with it. A program that may
                # ask stays in the terminal's.
                start_new_session=not is_interactive,
            )
        except (OSError, ValueError) as error:
            self._fail(f"cannot be started: {error}")
        output, errors = self._wait(process, is_interactive)
        if process.returncode != 0:
            ended = (
                f"failed with exit code {process.returncode}"
                if process.returncode > 0
                else f"was ended by {signal.Signals(-process.returncode).name}"
            )
            self._fail(ended, errors)
        sys.stderr.write(errors)
        return self._credential_of(output, errors)

    def _wait(self, process: subprocess.Popen[bytes], is_interactive: bool) -> tuple[bytes, str]:
        """Return what the program prints until it ends. Raises ClusterUnreachable if it takes too long."""
        limit_s = INTERACTIVE_LIMIT_S if is_interactive else LIMIT_S
        try:
            try:
                output, errors = process.communicate(timeout=NOTICE_S)
            except subprocess.TimeoutExpired as waiting:
                # What it has said so far may be how to log in.
                said = (waiting.stderr or b"").decode(errors="replace")
                print(f"waiting for {self._what} ...\n{said}", end="", file=sys.stderr, flush=True)
                output, errors = process.communicate(timeout=limit_s - NOTICE_S)
        except subprocess.TimeoutExpired as late:
            self._fail(
                f"has not ended after {limit_s:g} s", (late.stderr or b"").decode(errors="replace")
            )
        finally:
            if process.poll() is None:
                if is_interactive:
                    process.kill()
                else:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return output, (errors or b"").decode(errors="replace")

    def _is_interactive(self) -> bool:
        """Return whether the program may ask on the terminal."""
        is_terminal = sys.stdin is not None and sys.stdin.isatty()
        if self._config.interactive_mode == "Always" and not is_terminal:
            self._fail("has to ask (interactiveMode: Always), and standard input is not a terminal")
        return is_terminal and self._config.interactive_mode != "Never"

    def _request(self, is_interactive: bool) -> Object:
        """Return the ExecCredential object that the program finds in KUBERNETES_EXEC_INFO."""
        spec: Object = {"interactive": is_interactive}
        if self._config.provide_cluster_info:
            spec = {"cluster": self._cluster_info()} | spec
        return {"kind": "ExecCredential", "apiVersion": self._config.api_version, "spec": spec}

    def _cluster_info(self) -> Object:
        cluster = self._cluster
        authority = cluster.certificate_authority_data
        if cluster.certificate_authority:
            authority = Path(cluster.certificate_authority).read_bytes()
        found: Object = {
            "server": cluster.server,
            "tls-server-name": cluster.tls_server_name,
            "insecure-skip-tls-verify": cluster.insecure_skip_tls_verify,
            "certificate-authority-data": base64.b64encode(authority).decode(),
            "proxy-url": cluster.proxy_url,
            "disable-compression": cluster.disable_compression,
        }
        config = [each.extension for each in cluster.extensions if each.name == EXEC_EXTENSION]
        return {key: value for key, value in found.items() if value} | {
            "config": config[0] if config else None
        }

    def _credential_of(self, output: bytes, errors: str) -> Credential:
        """Parse what the program has printed. Raises ClusterUnreachable if it is no credential."""
        try:
            answer = json.loads(output)
        except ValueError:
            self._fail("printed no ExecCredential: its output is not JSON", errors)
        if not isinstance(answer, dict) or answer.get("kind") != "ExecCredential":
            self._fail("printed no ExecCredential: its output has another kind", errors)
        if answer.get("apiVersion") != self._config.api_version:
            self._fail(
                f"printed an ExecCredential of version {answer.get('apiVersion')}, and the kubeconfig "
                f"expects {self._config.api_version}",
                errors,
            )
        status = answer.get("status")
        keys = ("token", "clientCertificateData", "clientKeyData", "expirationTimestamp")
        values = [status.get(key) or "" for key in keys] if isinstance(status, dict) else []
        if not any(values[:3]):
            self._fail("printed an ExecCredential with neither a token nor a certificate", errors)
        if not all(isinstance(value, str) for value in values):
            self._fail(
                f"printed an ExecCredential in which one of {', '.join(keys)} is no text", errors
            )
        token, certificate, key, expires = values
        if bool(certificate) != bool(key):
            self._fail(
                "printed a certificate without its key, or a key without its certificate", errors
            )
        return Credential(
            token=token, certificate=certificate, key=key, expires=self._time_of(expires, errors)
        )

    def _time_of(self, text: str, errors: str) -> datetime | None:
        if not text:
            return None
        try:
            return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(timezone.utc)
        except ValueError:
            self._fail(f"printed an expirationTimestamp that is no time: {text!r}", errors)

    def _fail(self, what: str, errors: str = "") -> NoReturn:
        raise ClusterUnreachable(
            f"{self._what} {what}",
            *_lines(errors)[-LINES_SHOWN:],
            *_lines(self._config.install_hint),
            "Nothing was asked of the cluster. Install that program or log in with it, or choose another "
            "context (--context).",
        )


def _lines(text: str) -> list[str]:
    """Return the lines of a foreign text, without characters that could change the terminal's state."""
    lines = text.strip().splitlines()
    return ["".join(each if each.isprintable() else " " for each in line) for line in lines]
