"""The promises of docs/explanation/security.md about a real cluster, checked with an active run."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, Ended, Object, Team, get, kubectl, run, wait_for
from pod_security import violations

from tests.agreement.security_page import documented_rights

DIGITS = "examples/digits.yaml"
LONG = ("--workers", "1", "--set", "train.model.image_size=16", "--set", "train.epochs=100000")
RUN = "guarded"


class Witness:
    """A record of all pods that are created in a namespace, from a watch on the API server."""

    def __init__(self, namespace: str, file: Path) -> None:
        self.file = file
        command = ["kubectl", "get", "pods", "-n", namespace, "--watch", "-o", "json"]
        with file.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output)

    def pods(self) -> dict[str, Object]:
        """Return the pods by name, as they were when they were first seen."""
        seen: dict[str, Object] = {}
        decoder, rest = json.JSONDecoder(), self.file.read_text().lstrip()
        with suppress(json.JSONDecodeError):  # of what is just being written
            while rest:
                pod, end = decoder.raw_decode(rest)
                seen.setdefault(pod["metadata"]["name"], pod)
                rest = rest[end:].lstrip()
        return seen


@pytest.fixture(scope="module")
def witness(
    make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Team, Witness]]:
    team = make_team("security")
    watching = Witness(team.namespace, tmp_path_factory.mktemp("witness") / "pods")
    yield team, watching
    watching.process.kill()


@pytest.fixture(scope="module")
def team(witness: tuple[Team, Witness], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = witness[0]
    team.install(
        tmp_path_factory.mktemp("values"),
        launcher={"rbac": {"subjects": [{"kind": "ServiceAccount", "name": "engineer"}]}},
        prePull={"enabled": True, "pools": ["cpu"]},
    )
    return team


@pytest.fixture(scope="module")
def engineer(team: Team, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The kubeconfig of a service account that has only the launcher's Role."""
    kubectl("create", "serviceaccount", "engineer", "-n", team.namespace)
    token = kubectl("create", "token", "engineer", "-n", team.namespace).strip()
    view = json.loads(kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    view["users"][0]["user"] = {"token": token}
    path = tmp_path_factory.mktemp("engineer") / "kubeconfig"
    path.write_text(json.dumps(view))
    return str(path)


@pytest.fixture(scope="module")
def do(team: Team, engineer: str) -> Callable[..., Ended]:
    """A function that runs a command of the launcher with only these rights, and requires success."""

    def do(*arguments: str) -> Ended:
        ended = team.trainyard(*arguments, KUBECONFIG=engineer)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended

    return do


@pytest.fixture(scope="module")
def under_way(team: Team, do: Callable[..., Ended]) -> Object:
    """The RayJob of an active run that would train for hours."""
    do("submit", DIGITS, "--name", RUN, *LONG, "--detach")
    # A run has no log before its head exists.
    wait_for("it trains", lambda: "epoch 2/" in team.trainyard("logs", RUN).stdout)
    (job,) = team.rayjobs()
    return job


def pods_of(team: Team) -> dict[str, Object]:
    """Return the head and the worker of the run by type."""
    return {
        pod["metadata"]["labels"]["ray.io/node-type"]: pod for pod in team.pods(is_ray_node="yes")
    }


def review(kind: str, spec: Object, account: str) -> Object:
    """Return the API server's answer to an account's question about its own rights."""
    body = {"kind": kind, "apiVersion": "authorization.k8s.io/v1", "spec": spec}
    path = f"/apis/authorization.k8s.io/v1/{kind.lower()}s"
    said = run(
        "kubectl", "create", "--raw", path, "-f", "-", stdin=json.dumps(body), KUBECONFIG=account
    )
    assert said.returncode == 0, said.stderr
    status: Object = json.loads(said.stdout)["status"]
    return status


def test_the_launcher_s_account_has_exactly_the_rights_that_are_documented(
    team: Team, engineer: str
) -> None:
    """Compare the documented rights with those that the API server reports to the account itself."""
    status = review("SelfSubjectRulesReview", {"namespace": team.namespace}, engineer)
    found: dict[str, set[str]] = {}
    for rule in status["resourceRules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                if not resource.startswith("selfsubject"):
                    name = f"{resource}.{group}" if group else resource
                    found.setdefault(name, set()).update(rule["verbs"])
    assert found == documented_rights()


def can(verb: str, resource: str, namespace: str, account: str) -> bool:
    """Return whether an account may do something, in all namespaces if none is given.

    The review is sent directly, because `kubectl auth can-i` answers no for kinds that the cluster does not
    have.
    """
    name, _, rest = resource.partition("/")
    part, _, group = (rest if rest else name).partition(".")
    what = {"resource": name, "subresource": part} if rest else {"resource": part}
    attributes = {"verb": verb, "group": group, "namespace": namespace, **what}
    status = review("SelfSubjectAccessReview", {"resourceAttributes": attributes}, account)
    return bool(status["allowed"])


def test_one_verb_more_is_denied_on_each_resource(team: Team, engineer: str) -> None:
    every = ("get", "list", "watch", "create", "patch", "update", "delete", "deletecollection")
    for resource, verbs in documented_rights().items():
        more = next(verb for verb in reversed(every) if verb not in verbs)
        assert not can(more, resource, team.namespace, engineer), (more, resource)
        # The reviews are valid: the documented rights are granted.
        assert can(sorted(verbs)[0], resource, team.namespace, engineer), resource


@pytest.mark.parametrize(
    ("verb", "resource"),
    [
        ("list", "secrets"), ("create", "secrets"), ("create", "configmaps"), ("get", "serviceaccounts"),
        ("create", "serviceaccounts/token"), ("create", "roles.rbac.authorization.k8s.io"),
        ("create", "rolebindings.rbac.authorization.k8s.io"), ("create", "deployments.apps"),
        ("create", "pods/ephemeralcontainers"), ("create", "pods/eviction"), ("delete", "events"),
    ],
)  # fmt: skip
def test_what_would_lead_to_more_rights_is_denied(
    team: Team, engineer: str, verb: str, resource: str
) -> None:
    assert not can(verb, resource, team.namespace, engineer)


def test_other_namespaces_and_the_cluster_are_closed(team: Team, engineer: str) -> None:
    for namespace in ("default", "kube-system"):
        for verb, resource in (("list", "pods"), ("create", "rayjobs.ray.io"), ("get", "secrets")):
            assert not can(verb, resource, namespace, engineer)
    for verb, resource in (("list", "rayjobs.ray.io"), ("list", "pods"), ("get", "secrets")):
        assert not can(verb, resource, "", engineer)
    for verb, resource in (("list", "nodes"), ("get", "namespaces"), ("impersonate", "users")):
        assert not can(verb, resource, "", engineer)
    everywhere = run(ROOT / ".venv/bin/trainyard", "list", "-A", KUBECONFIG=engineer)
    assert everywhere.returncode == 3
    assert "Forbidden" in everywhere.stderr


def inside(team: Team, pod: Object, script: str) -> str:
    """Return the output of a shell script in the first container of a pod."""
    name = pod["metadata"]["name"]
    return kubectl("exec", "-n", team.namespace, name, "-c", pod["spec"]["containers"][0]["name"],
                   "--", "sh", "-c", script)  # fmt: skip


TOUCH = """
for place in / /etc /usr/bin /opt/trainyard /var /root /home /sys /proc/sys/kernel; do
  touch $place/x 2>/dev/null && echo $place can be written
done
for place in /tmp /home/trainyard /mnt/trainyard; do
  { touch $place/x && rm $place/x; } || echo $place cannot be written
done
ls -d /var/run/secrets 2>/dev/null || true
"""


@pytest.mark.parametrize("kind", ["head", "worker"])
def test_a_ray_pod_is_no_root_has_no_right_and_writes_nowhere_but_where_it_should(
    team: Team, under_way: Object, kind: str
) -> None:
    pod = pods_of(team)[kind]
    status = inside(team, pod, "cat /proc/self/status")
    facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert facts["Uid"].split() == facts["Gid"].split() == ["1000"] * 4
    assert {facts[name] for name in ("CapEff", "CapPrm", "CapBnd", "CapInh")} == {"0" * 16}
    assert (facts["NoNewPrivs"], facts["Seccomp"]) == ("1", "2")
    assert inside(team, pod, TOUCH) == ""


LOCKED = """
import importlib.metadata, json, pathlib
packages = importlib.metadata.distributions()
found = {one.metadata["Name"].lower().replace("_", "-"): one.version for one in packages}
print(json.dumps([found, pathlib.Path("/opt/trainyard/requirements.txt").read_text()]))
"""


def test_the_image_holds_just_the_locked_packages(team: Team, neighbour: str) -> None:
    command = ("exec", "-n", team.namespace, neighbour, "--", "python", "-c", LOCKED)
    found, lock = json.loads(kubectl(*command))
    assert lock == (ROOT / "train_image/requirements.txt").read_text()
    lines = [line for line in lock.splitlines() if line[:1] not in ("", " ", "#")]
    wanted = dict(line.split()[0].split("==") for line in lines)
    assert {name: version for name, version in found.items() if wanted.get(name) != version}.keys() <= {
        "pip", "setuptools",  # of the virtual environment
    }  # fmt: skip
    elsewhere = {line.partition("==")[0] for line in lines if " ; " in line}  # other machines
    assert wanted.keys() - found.keys() <= elsewhere


ASK = """
import json, os, sys, urllib.error, urllib.request
host, token = sys.argv[1:3]
def ask(path, body=None):
    headers = {"Authorization": "Bearer " + token} if token else {}
    request = urllib.request.Request(f"http://{host}:8265{path}", body and json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
said = {"jobs": ask("/api/jobs/"), "nodes": ask("/nodes?view=summary")}
said["submit"] = ask("/api/jobs/", {"entrypoint": "echo taken over"})
os.environ["RAY_AUTH_MODE"] = "token" if token else "disabled"
if token:
    os.environ["RAY_AUTH_TOKEN"] = token
from ray._raylet import GcsClient
try:
    client = GcsClient(address=f"{host}:6379")
    said["gcs"] = bool(client.get_all_node_info(timeout=20))
except Exception as error:
    said["gcs"] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def neighbour(team: Team, under_way: Object) -> Iterator[str]:
    """Another pod of the namespace with Ray, which is not part of the run."""
    config_map = get("configmap", team.namespace, "trainyard-platform")
    pod = yaml.safe_load(config_map["data"]["platform.yaml"])["readerPod"]
    pod["metadata"] = {"name": "neighbour"}
    pod["spec"] |= {"activeDeadlineSeconds": 1800, "terminationGracePeriodSeconds": 0}
    pod["spec"]["containers"][0] |= {"image": team.image, "command": ["sleep", "1800"]}
    kubectl("create", "-n", team.namespace, "-f", "-", stdin=json.dumps(pod))
    kubectl(
        "wait", "-n", team.namespace, "pod/neighbour", "--timeout=180s", "--for=condition=Ready"
    )
    yield "neighbour"
    kubectl("delete", "pod", "neighbour", "-n", team.namespace)


def asked(team: Team, neighbour: str, token: str) -> dict[str, Any]:
    """Return the answers of the run's head to a request with this token."""
    host = pods_of(team)["head"]["status"]["podIP"]
    command = (
        "exec",
        "-n",
        team.namespace,
        neighbour,
        "--",
        "timeout",
        "100",
        "python",
        "-c",
        ASK,
        host,
        token,
    )
    answers: dict[str, Any] = json.loads(kubectl(*command).splitlines()[-1])
    return answers


def test_who_has_the_token_is_answered(team: Team, neighbour: str, under_way: Object) -> None:
    name = under_way["status"]["rayClusterName"]
    secret = get("secret", team.namespace, name)["data"]["auth_token"]
    answers = asked(team, neighbour, base64.b64decode(secret).decode())
    assert answers == {"jobs": 200, "nodes": 200, "submit": 200, "gcs": True}


@pytest.mark.parametrize("token", ["", "bm90LXRoZS10b2tlbg=="], ids=["no token", "another token"])
def test_who_has_not_got_the_token_is_refused_by_dashboard_jobs_api_and_gcs(
    team: Team, neighbour: str, token: str
) -> None:
    answers = asked(team, neighbour, token)
    assert "InvalidAuthToken" in answers.pop("gcs")
    assert answers == dict.fromkeys(answers, 403 if token else 401)


def test_the_commands_need_no_more_than_these_rights(
    team: Team, do: Callable[..., Ended], under_way: Object, engineer: str, tmp_path: Path
) -> None:
    assert RUN in do("list").stdout
    assert json.loads(do("status", RUN, "--json").stdout)["submissions"]
    assert do("explain", RUN).stdout
    assert "RayTrainWorker" in do("logs", RUN, "--worker", "0").stdout
    assert "run.json" in do("cp", f"{RUN}:").stdout
    do("cp", f"{RUN}:run.json", str(tmp_path / "run.json"))
    do("platform", "get")
    do("diff", DIGITS, "--name", RUN, *LONG)
    do("submit", DIGITS, "--name", f"{RUN}-dry", *LONG, "--dry-run=server")
    # Commands succeed without what the account may not read.
    checks = json.loads(do("preflight", DIGITS, *LONG, "--json").stdout)
    assert {check["name"]: check["state"] for check in checks}["nodes"] == "not known"
    command = (
        ROOT / ".venv/bin/trainyard",
        "shell",
        RUN,
        "0",
        "-n",
        team.namespace,
        "--",
        "id",
        "-u",
    )
    assert run(*command, KUBECONFIG=engineer).stdout == "1000\n"
    dashboard = subprocess.Popen(
        [ROOT / ".venv/bin/trainyard", "dashboard", RUN, "--port", "0", "-n", team.namespace],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"KUBECONFIG": engineer},
    )  # fmt: skip
    assert dashboard.stdout is not None
    assert dashboard.stdout.readline().startswith("http://127.0.0.1:")
    dashboard.send_signal(signal.SIGINT)
    assert dashboard.wait(20) == 130

    do("suspend", RUN)
    wait_for("its pods are gone", lambda: not team.pods(is_ray_node="yes"))
    do("stop", RUN, "--now")
    # The head is gone: a reader pod reads the folder and deletes it.
    assert "epoch 1/" in do("logs", RUN).stdout
    do("delete", RUN, "--folder", "--yes")
    assert team.trainyard("cp", f"{RUN}:", KUBECONFIG=engineer).returncode == 2


def test_pods_of_every_kind_were_admitted_where_restricted_is_enforced(
    witness: tuple[Team, Witness], team: Team, under_way: Object
) -> None:
    labels = get("namespace", "default", team.namespace)["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    tested = run("helm", "test", "trainyard", "-n", team.namespace, "--timeout", "180s")
    assert tested.returncode == 0, tested.stderr
    pods = witness[1].pods()
    kinds = ("-head-", "-worker-", f"{RUN}-reader-", "preflight-", "probe-storage", "prepull-")
    assert [kind for kind in kinds if not any(kind in name for name in pods)] == [], list(pods)
    assert {name: wrong for name, pod in pods.items() if (wrong := violations(pod["spec"]))} == {}
    for name, pod in pods.items():
        assert not [
            v for v in pod["spec"].get("volumes", []) if "projected" in v or "hostPath" in v
        ], name
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, name
    refused = [
        event["message"]
        for event in get("events", team.namespace)["items"]
        if "violates PodSecurity" in event["message"]
    ]
    assert refused == []
