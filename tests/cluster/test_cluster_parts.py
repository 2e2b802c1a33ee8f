"""The pure parts of the test cluster; that it works shows in `make e2e`."""

from __future__ import annotations

import base64
import gzip
import io
import ipaddress
import itertools
import json
import tarfile
import time
from pathlib import Path

import build
import certificates
import extras
import images
import kueue
import machine
import monitoring
import objects
import parts
import processes
import pytest
from layout import Home

HOME = Home(Path("/home/somebody/cluster"))


def test_a_process_name_may_hold_brackets_and_blanks() -> None:
    stat = "42 (odd) name (x) S 1 42 42 0 -1 4194560 1 0 0 0 3 1 0 0 20 0 9 0 7777 1 2"
    assert processes.parse_stat(stat) == ("S", 7777)


def test_a_reused_process_id_is_another_process() -> None:
    mine = processes.start_time(1)
    assert mine is not None
    assert processes.Process("init", 1, mine).is_alive()
    assert not processes.Process("init", 1, mine + 1).is_alive()


def test_a_process_of_the_cluster_has_no_proxy_and_no_folder_of_the_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("https_proxy", "HTTP_PROXY", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, "/nonexistent")
    ledger = processes.Ledger(tmp_path / "ledger.json")
    ledger.start("env", ["/usr/bin/env"], tmp_path / "log", tmp_path)
    (started,) = ledger.processes
    while started.is_alive():
        time.sleep(0.01)
    lines = (tmp_path / "log").read_text().splitlines()
    assert f"{processes.MARK}={tmp_path}" in lines
    assert "nonexistent" not in "".join(lines)


def test_mounts_of_a_folder_come_latest_first_and_unescaped() -> None:
    mountinfo = "\n".join(
        f"{number} 1 0:1 / {point} rw - tmpfs tmpfs rw"
        for number, point in enumerate(("/a/b", "/a/b/c\\040d", "/a/bc", "/a"))
    )
    assert machine.mounts_below(Path("/a/b"), mountinfo) == [Path("/a/b/c d"), Path("/a/b")]


@pytest.mark.parametrize(
    ("go_mod", "names"),
    [
        ("tool example.org/x/cmd/helm\n", ["helm"]),
        ("tool (\n\ta.org/kubelet\n\ta.org/kubectl\n)\n", ["kubelet", "kubectl"]),
        ("module pause\n", []),
    ],
)
def test_tool_lines_name_the_programs(go_mod: str, names: list[str]) -> None:
    assert build.tool_names(go_mod) == names


def test_kubernetes_is_told_the_version_that_is_pinned() -> None:
    flags = {sets.name: sets.linker_flags() for sets in build.tool_sets()}
    assert "gitVersion=v1.34." in flags["kubernetes"]
    assert not [name for name in flags if name != "kubernetes" and "gitVersion" in flags[name]]
    assert "version.GitVersion=v0.17." in flags["kueue"]


def test_every_part_is_built_or_comes_from_a_debian_package() -> None:
    programs = {program for sets in build.tool_sets() for program in sets.programs()}
    for part in parts.parts(HOME):
        first, *_ = words = [Path(word) for word in part.command]
        assert first.parent == HOME.bin or first.name in build.PACKAGES
        assert {word.name for word in words if word.parent == HOME.bin} <= programs


def test_made_up_nodes_take_no_pod_that_does_not_ask_for_them() -> None:
    made = objects.made_up_nodes({0, 2, 1})
    assert made is not None
    nodes = made["items"]
    assert isinstance(nodes, list)
    assert [node["metadata"]["name"] for node in nodes] == ["made-up-0", "made-up-1", "made-up-2"]
    assert objects.made_up_nodes(()) is None
    for node in nodes:
        assert node["spec"]["taints"][0]["effect"] == "NoSchedule"
        assert node["status"]["allocatable"]["nvidia.com/gpu"] == "8"
        assert node["metadata"]["labels"][parts.MADE_UP] == "true"


def test_what_is_optional_does_not_make_another_cluster() -> None:
    added = [part for extra in extras.EXTRAS.values() for part in extra.parts(HOME)]
    names = {part.name for part in (*added, parts.kwok(HOME))}
    assert not names & {part.name for part in parts.parts(HOME)}
    assert set(build.OPTIONAL) < {tools.name for tools in build.tool_sets()}


def test_kueue_is_a_process_behind_its_services_and_refuses_no_pod() -> None:
    service = {
        "kind": "Service",
        "metadata": {"name": "kueue-webhook-service"},
        "spec": {"selector": {"app": "kueue"}, "ports": [{"port": 443, "targetPort": 8082}]},
    }
    webhooks = [
        {"name": name, "rules": [{"resources": [name, f"{name}/status"]}]}
        for name in ("pods", "rayjobs", "workloads")
    ]
    names = {"name": "any"}
    found = kueue.objects_for_process(
        [
            {"kind": "Deployment", "metadata": names},
            {"kind": "Service", "metadata": {"name": "kueue-metrics"}, "spec": {}},
            service,
            {"kind": "ValidatingWebhookConfiguration", "metadata": names, "webhooks": webhooks},
        ]
    )
    assert [each["kind"] for each in found] == [
        "Service", "EndpointSlice", "ValidatingWebhookConfiguration"
    ]  # fmt: skip
    assert found[0]["spec"] == {"ports": [{"port": 443, "targetPort": 9443}]}
    assert found[1]["endpoints"][0]["addresses"] == [parts.NODE_ADDRESS]
    assert [webhook["name"] for webhook in found[2]["webhooks"]] == ["rayjobs", "workloads"]


@pytest.mark.parametrize("name", extras.EXTRAS)
def test_the_programs_of_an_extra_are_built_by_its_sets(name: str) -> None:
    extra = extras.EXTRAS[name]
    sets = {tools.name: tools for tools in build.tool_sets()}
    built = {program for each in extra.sets for program in sets[each].programs()}
    words = {Path(word) for part in extra.parts(HOME) for word in part.command}
    assert {word.name for word in words if word.parent == HOME.bin} == built
    assert set(extra.sets) <= set(build.OPTIONAL)


def test_prometheus_gets_what_its_operator_has_made() -> None:
    text = "rule_files: [/etc/prometheus/rules/prometheus-test-rulefiles-0/*.yaml] # $(SHARD)"
    packed = base64.b64encode(gzip.compress(text.encode())).decode()
    secret = {"data": {"prometheus.yaml.gz": packed}}
    there = "rule_files: [/here/prometheus-test-rulefiles-0/*.yaml] # 0"
    assert monitoring.configuration(secret, "/here") == there
    maps = [
        {"metadata": {"name": "prometheus-test-rulefiles-0"}, "data": {"team-runs.yaml": "groups"}},
        {"metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": "-"}},
    ]
    assert monitoring.rule_files(maps) == {"prometheus-test-rulefiles-0/team-runs.yaml": "groups"}


def test_the_nodes_share_a_machine_and_nothing_else() -> None:
    nodes = [
        {path.name: json.loads(text) for path, text in files.items() if path.name in OWN}
        for files in (
            parts.config_files(HOME),
            *(parts.files_of_node(HOME, node) for node in parts.ADDED_NODES),
        )
    ]
    for name, own in OWN.items():
        for first, second in itertools.combinations((flat(files[name]) for files in nodes), 2):
            differs = {key for key in first.keys() | second if first.get(key) != second.get(key)}
            assert {key.rpartition(".")[2] for key in differs} == own


def test_no_two_networks_of_the_cluster_overlap() -> None:
    pods = [parts.POD_NETWORK, *(node.pod_network for node in parts.ADDED_NODES)]
    networks = [ipaddress.ip_network(each) for each in (*pods, parts.MADE_UP_NETWORK)]
    networks += [ipaddress.ip_network(each.address) for each in parts.ADDED_NODES]
    networks += [ipaddress.ip_network(parts.NODE_ADDRESS)]
    assert not [pair for pair in itertools.combinations(networks, 2) if pair[0].overlaps(pair[1])]


OWN = {
    "kubelet.json": {
        "cgroupRoot", "containerRuntimeEndpoint", "port", "healthzPort", "podLogsDir"
    },
    "10-bridge.conflist": {"bridge", "subnet", "dataDir"},
}  # fmt: skip


def flat(value: object, path: str = "") -> dict[str, object]:
    """Each leaf by its path."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)  # type: ignore[arg-type]
    found: dict[str, object] = {}
    for key, inner in pairs:
        where = f"{path}.{key}"
        found |= flat(inner, where) if isinstance(inner, dict | list) else {where: inner}
    return found


def test_a_changed_setting_or_program_is_another_cluster() -> None:
    same = parts.fingerprint(HOME, "programs")
    assert same == parts.fingerprint(HOME, "programs")
    assert same != parts.fingerprint(HOME, "newer programs")
    assert same != parts.fingerprint(Home(Path("/elsewhere")), "programs")


def test_the_pause_image_is_an_archive_that_names_itself() -> None:
    content = io.BytesIO(images.pause_archive(b"program", "amd64"))
    with tarfile.open(fileobj=content) as archive:
        manifest = json.load(archive.extractfile("manifest.json") or io.BytesIO())
        names = archive.getnames()
    assert manifest[0]["RepoTags"] == [parts.PAUSE_IMAGE]
    assert {manifest[0]["Config"], *manifest[0]["Layers"]} < set(names)


def test_all_names_of_an_outdated_image_go_and_foreign_ones_stay() -> None:
    listing = "\n".join(
        [
            "REF TYPE DIGEST SIZE",
            "127.0.0.1:5000/trainyard:old type sha256:1 6",
            "127.0.0.1:5000/trainyard@sha256:1 type sha256:1 6",
            "sha256:9 type sha256:1 6",
            "127.0.0.1:5000/trainyard:new type sha256:2 6",
            "localhost/pause:1 type sha256:3 6",
        ]
    )
    old = images.outdated(listing, kept={"sha256:2"})
    assert old == [
        "127.0.0.1:5000/trainyard:old",
        "127.0.0.1:5000/trainyard@sha256:1",
        "sha256:9",
    ]


def test_only_our_volumes_without_a_claim_are_recycled() -> None:
    def volume(name: str, storage_class: str, phase: str) -> dict[str, dict[str, str]]:
        return {
            "metadata": {"name": name},
            "spec": {"storageClassName": storage_class},
            "status": {"phase": phase},
        }

    volumes = [
        volume("free", objects.STORAGE_CLASS, "Available"),
        volume("used", objects.STORAGE_CLASS, "Bound"),
        volume("done", objects.STORAGE_CLASS, "Released"),
        volume("other", "somebody-elses", "Released"),
    ]
    assert objects.released(volumes) == ["done"]


def test_no_gpus_means_no_entry() -> None:
    assert objects.gpu_patch(0)["status"] == {
        "capacity": {"nvidia.com/gpu": None},
        "allocatable": {"nvidia.com/gpu": None},
    }


def test_the_kubeconfig_speaks_to_the_loopback_address() -> None:
    config = json.dumps(certificates.kubeconfig("authority", "token"))
    assert "https://127.0.0.1:6443" in config
    assert parts.NODE_ADDRESS not in config
