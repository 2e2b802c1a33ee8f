"""Images of the cluster: the pause image, and which images to throw away so that no disk fills."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from pathlib import Path

from layout import Home
from machine import run
from parts import PAUSE_IMAGE, REGISTRY

TAGS_KEPT = 2


def pause_archive(program: bytes, architecture: str) -> bytes:
    """An image of one static program, in the format of `docker save`. The architecture is in Go's words."""
    layer = _tar({"pause": program}, mode=0o755)
    config = {
        "architecture": architecture,
        "os": "linux",
        "config": {"Entrypoint": ["/pause"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [PAUSE_IMAGE], "Layers": ["layer.tar"]}]
    files = {"manifest.json": manifest, "config.json": config}
    return _tar(
        {**{n: json.dumps(v).encode() for n, v in files.items()}, "layer.tar": layer}, 0o644
    )


def _tar(files: dict[str, bytes], mode: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def prune_registry(home: Home) -> None:
    """Keep the newest tags of each repository, and drop all content that no tag names.

    Only while the registry is stopped: its garbage collection must not meet a push.
    """
    for tags in _repositories(home):
        by_age = sorted(tags.iterdir(), key=lambda tag: (tag / "current/link").stat().st_mtime)
        for tag in by_age[:-TAGS_KEPT]:
            shutil.rmtree(tag)
    if home.registry.exists():
        config = home.config / "registry.json"
        run("docker-registry", "garbage-collect", "--delete-untagged", config)


def prune_containerd(home: Home, node: Home) -> None:
    """Drop a node's copies of images that the registry no longer has. Only while no pod runs there."""
    tags = [tag for folder in _repositories(home) for tag in folder.iterdir()]
    kept = {(tag / "current/link").read_text().strip() for tag in tags}
    ctr = ("ctr", "--address", str(node.containerd_socket), "--namespace", "k8s.io", "images")
    if old := outdated(run(*ctr, "list"), kept):
        run(*ctr, "remove", "--sync", *old)


def outdated(listing: str, kept: set[str]) -> list[str]:
    """The names, out of a table of `ctr images list`, of images from our registry with other digests.

    One image has several names (tag, digest, configuration); all of them must go for its content to go.
    """
    rows = [line.split()[0:3:2] for line in listing.splitlines()[1:]]
    ours = {digest for name, digest in rows if name.startswith(f"{REGISTRY}/")}
    return [name for name, digest in rows if digest in ours - kept]


def _repositories(home: Home) -> list[Path]:
    """The folders of tags, in the registry's own layout."""
    return list(home.registry.glob("docker/registry/v2/repositories/**/_manifests/tags"))
