"""What `build` makes: the servers, from pinned Go modules, and the programs that Debian packages bring."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from images import pause_archive
from layout import ClusterError, Home
from machine import run

SOURCES = Path(__file__).parent / "tools"
"""One Go module per set: its `tool` lines say what is built, its go.sum makes that one exact thing."""

OPTIONAL = (
    "alertmanager",
    "faultfs",
    "flux",
    "kueue",
    "kwok",
    "prometheus",
    "prometheus-operator",
)
"""Sets that `up` does without."""

OPERATOR_MODULE = "github.com/ray-project/kuberay/ray-operator"
KUEUE_MODULE = "sigs.k8s.io/kueue"
KWOK_MODULE = "sigs.k8s.io/kwok"
PROMETHEUS_OPERATOR_MODULE = "github.com/prometheus-operator/prometheus-operator"
KUSTOMIZE_CONTROLLER_MODULE = "github.com/fluxcd/kustomize-controller"
SOURCE_CONTROLLER_MODULE = "github.com/fluxcd/source-controller"

TAGS = {"prometheus": "remove_all_sd,enable_kubernetes_sd"}
"""Build tags of a set: of Prometheus' many ways to discover targets, only the one that is used is built."""

PACKAGES = {
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "etcd": "etcd-server",
    "iptables": "iptables",
    "ip": "iproute2",
    "conntrack": "conntrack",
    "docker-registry": "docker-registry",
    "openssl": "openssl",
    "unshare": "util-linux",
    "promtool": "prometheus",
}
"""A program, and the Debian package that brings it."""


@dataclass(frozen=True)
class ToolSet:
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def go_mod(self) -> str:
        return (self.folder / "go.mod").read_text()

    def programs(self) -> list[str]:
        return tool_names(self.go_mod) or [self.name]

    def linker_flags(self) -> str:
        return " ".join(["-s -w", *version_flags(self.go_mod)])

    def tags(self) -> str:
        return TAGS.get(self.name, "")

    def stamp(self, go_version: str) -> str:
        """Stands for everything that decides what comes out of the build."""
        sources = [
            p.read_bytes()
            for p in sorted(self.folder.iterdir())
            if p.suffix in (".mod", ".sum", ".go")
        ]
        flags = f"{self.linker_flags()}{self.tags()}".encode()
        return hashlib.sha256(b"\0".join([*sources, flags, go_version.encode()])).hexdigest()


def tool_sets() -> list[ToolSet]:
    return [ToolSet(path.parent) for path in sorted(SOURCES.glob("*/go.mod"))]


def tool_names(go_mod: str) -> list[str]:
    """The programs that the `tool` lines of a go.mod name, alone or in a block."""
    blocks = re.findall(r"^tool \(\n(.*?)^\)", go_mod, re.DOTALL | re.MULTILINE)
    packages = re.findall(r"^tool (\S+)$", go_mod, re.MULTILINE) + "".join(blocks).split()
    return [package.rsplit("/", 1)[1] for package in packages if package != "("]


def version_flags(go_mod: str) -> list[str]:
    """Kubernetes and Kueue learn their own version from the linker; without it a server says 0.0.0."""
    kueue = re.search(rf"\b{re.escape(KUEUE_MODULE)} (v\S+)", go_mod)
    if kueue:
        # In a pod its server for positions keeps its certificate in /visibility; here it is a folder of
        # the directory in which it starts.
        values = {"version.GitVersion": kueue.group(1), "visibility.certDir": "visibility"}
        return [f"-X {KUEUE_MODULE}/pkg/{name}={value}" for name, value in values.items()]
    found = re.search(r"\bk8s\.io/kubernetes v(\d+)\.(\d+)\.\d+", go_mod)
    if not found or "k8s.io/kubernetes/cmd/" not in go_mod:
        return []
    version = found.group(0).split()[1]
    values = {"gitVersion": version, "gitMajor": found.group(1), "gitMinor": found.group(2)}
    return [f"-X k8s.io/component-base/version.{name}={value}" for name, value in values.items()]


def build_all(home: Home, say: Callable[[str], None]) -> None:
    install_packages(say)
    build_tools(home, say)


def install_packages(say: Callable[[str], None]) -> None:
    missing = missing_packages()
    if not missing:
        return
    names = " ".join(missing)
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise ClusterError(
            f"Debian packages are missing: {names}\n       as root: apt-get install {names}"
        )
    say(f"installing Debian packages: {names}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "--yes", "--no-install-recommends", *missing]):
        if subprocess.run(["apt-get", "-qq", *command], env=environment, stdout=2).returncode:
            raise ClusterError(f"apt-get {command[0]} failed; see above\n       packages: {names}")


def missing_packages() -> list[str]:
    return [package for program, package in PACKAGES.items() if not shutil.which(program)]


def build_tools(home: Home, say: Callable[[str], None], names: Sequence[str] = ()) -> None:
    """Bring these sets up to date; all that `up` needs where none is named."""
    if not shutil.which("go"):
        raise ClusterError("the program `go` is missing\n       install Go 1.26 or newer")
    sets = {tools.name: tools for tools in tool_sets()}
    if unknown := set(names) - sets.keys():
        raise ClusterError(f"there is no set {unknown.pop()}\n       there are: {', '.join(sets)}")
    go_version = run("go", "env", "GOVERSION").strip()
    home.bin.mkdir(parents=True, exist_ok=True)
    for name in names or (name for name in sets if name not in OPTIONAL):
        _build_set(home, say, sets[name], go_version)


def _build_set(home: Home, say: Callable[[str], None], tools: ToolSet, go_version: str) -> None:
    stamp = _stamp_file(home, tools)
    wanted = tools.stamp(go_version)
    if stamp.exists() and stamp.read_text() == wanted and not _missing_programs(home, tools):
        return
    say(f"building {tools.name}: {', '.join(tools.programs())}")
    started = time.monotonic()
    stamp.unlink(missing_ok=True)
    _compile(home, tools)
    _AFTER.get(tools.name, lambda home, tools: None)(home, tools)
    stamp.write_text(wanted)
    say(f"built {tools.name} in {time.monotonic() - started:.0f} s")


def built(home: Home) -> str:
    """Stands for the programs that `build` has made for `up`."""
    needed = [tools for tools in tool_sets() if tools.name not in OPTIONAL]
    stamps = [_stamp_file(home, tools).read_text() for tools in needed]
    return hashlib.sha256("".join(stamps).encode()).hexdigest()


def _compile(home: Home, tools: ToolSet) -> None:
    what = "tool" if tool_names(tools.go_mod) else "."
    command = ["go", "build", "-mod=readonly", "-trimpath", "-buildvcs=false"]
    command += [
        f"-ldflags={tools.linker_flags()}",
        f"-tags={tools.tags()}",
        "-o",
        f"{home.bin}/",
        what,
    ]
    environment = {**os.environ, "CGO_ENABLED": "0", "GOWORK": "off"}
    if subprocess.run(command, cwd=tools.folder, env=environment, stdout=2).returncode:
        raise ClusterError(f"go build failed in {tools.folder}; see above")


def _copy_crds(home: Home, tools: ToolSet) -> None:
    """The operator's module also holds its custom resource definitions."""
    _copy_definitions(home.crds, _module_folder(tools.folder, OPERATOR_MODULE))


def _copy_monitoring_crds(home: Home, tools: ToolSet) -> None:
    module = _module_folder(tools.folder, PROMETHEUS_OPERATOR_MODULE)
    _copy_definitions(home.monitoring_crds, module, folder="example/prometheus-operator-crd")


def _copy_flux_crds(home: Home, tools: ToolSet) -> None:
    """Flux's controllers read each other's kinds. Of source-controller, there is only the module itself."""
    sources = tools.folder / "source-controller"
    run("go", "-C", str(sources), "mod", "download")
    modules = (
        _module_folder(tools.folder, KUSTOMIZE_CONTROLLER_MODULE),
        _module_folder(sources, SOURCE_CONTROLLER_MODULE),
    )
    _copy_definitions(home.flux_crds, *modules)


def _copy_definitions(to: Path, *modules: Path, folder: str = "config/crd/bases") -> None:
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir()
    for definition in (file for module in modules for file in (module / folder).glob("*.yaml")):
        (to / definition.name).write_bytes(definition.read_bytes())


def _copy_stages(home: Home, tools: ToolSet) -> None:
    """What kwok does with a node and with a pod: its module's own quickest way."""
    stages = _module_folder(tools.folder, KWOK_MODULE) / "kustomize/stage"
    files = [*stages.glob("node/fast/node-*.yaml"), *stages.glob("pod/fast/pod-*.yaml")]
    home.kwok_stages.write_text("---\n".join(file.read_text() for file in sorted(files)))


def _copy_kueue_manifests(home: Home, tools: ToolSet) -> None:
    """Kueue's module also holds its manifests, for kustomize, which refuses the module's own folder."""
    source = _module_folder(tools.folder, KUEUE_MODULE) / "config"
    shutil.rmtree(home.kueue_manifests, ignore_errors=True)
    for file in source.rglob("*"):
        if file.is_file():
            copy = home.kueue_manifests / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())


def _module_folder(folder: Path, module: str) -> Path:
    listed = run("go", "-C", str(folder), "list", "-m", "-f", "{{.Dir}}", module)
    return Path(listed.strip())


def _make_pause_image(home: Home, tools: ToolSet) -> None:
    architecture = run("go", "env", "GOARCH").strip()
    home.pause_image.write_bytes(pause_archive((home.bin / "pause").read_bytes(), architecture))


_AFTER: dict[str, Callable[[Home, ToolSet], None]] = {
    "flux": _copy_flux_crds,
    "kueue": _copy_kueue_manifests,
    "kwok": _copy_stages,
    "operator": _copy_crds,
    "pause": _make_pause_image,
    "prometheus-operator": _copy_monitoring_crds,
}


def _stamp_file(home: Home, tools: ToolSet) -> Path:
    return home.bin / f".{tools.name}.stamp"


def _missing_programs(home: Home, tools: ToolSet) -> list[str]:
    return [program for program in tools.programs() if not (home.bin / program).exists()]
