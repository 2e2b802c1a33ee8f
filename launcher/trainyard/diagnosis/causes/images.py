"""Failures to pull the image of a pod."""

from __future__ import annotations

import re

from trainyard.diagnosis.failure import Match, any_of, failure
from trainyard.diagnosis.snapshot import Snapshot, image_of
from trainyard.diagnosis.symptoms import find

PULLING = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
FAILED = "Failed"
"""The reason of the kubelet's events about images, and about other failures."""


def _unpulled(
    snapshot: Snapshot, cause: str, pattern: str, reasons: tuple[str, ...] = (*PULLING, FAILED)
) -> Match | None:
    """Return a match if a pod waits for its image with a message like this.

    `{image}` in the cause stands for the name of the image.
    """
    symptom = find(snapshot, pattern, reasons)
    if symptom is None:
        return None
    quoted = re.search(r'image "([^"]+)"', symptom.text)
    image = quoted[1] if quoted else image_of(symptom.pod) if symptom.pod else "IMAGE"
    return Match(
        cause=cause.format(image=image), evidence=(symptom.evidence,), values={"image": image}
    )


@failure(
    "image-denied",
    seen="containers that wait with ErrImagePull or ImagePullBackOff",
    remedy="Set imagePullSecrets in the platform's values to a Secret of namespace {namespace} with the "
    "registry's credentials, and check that they may read {image}.",
)
def image_denied(snapshot: Snapshot) -> Match | None:
    """The registry does not let the nodes pull the image."""
    pattern = any_of(
        "pull access denied", "unauthorized", "authorization failed", "403 Forbidden", "401 Unauth",
        "authentication required", "no basic auth credentials", "insufficient_scope",
    )  # fmt: skip
    return _unpulled(snapshot, "the registry does not let the nodes pull {image}", pattern)


@failure(
    "image-unreachable",
    seen="containers that wait with ErrImagePull or ImagePullBackOff",
    remedy="Check the registry's name in {image}, and that the nodes reach it (DNS, proxy, "
    "certificate).",
)
def image_unreachable(snapshot: Snapshot) -> Match | None:
    """The nodes do not reach the registry of the image."""
    pattern = any_of(
        "no such host", "dial tcp", "i/o timeout", "connection refused", "x509:", "tls: ",
        "server gave HTTP response to HTTPS client", "network is unreachable", "deadline exceeded",
        "server misbehaving", "EOF$", "50[0234] ",
    )  # fmt: skip
    return _unpulled(snapshot, "the nodes do not reach the registry of {image}", pattern)


@failure(
    "wrong-platform-image",
    seen="containers that wait with ErrImagePull, or end with `exec format error`",
    remedy="Build {image} for the processors of the nodes (`kubectl get nodes -L "
    "kubernetes.io/arch`).",
)
def wrong_platform_image(snapshot: Snapshot) -> Match | None:
    """The image is not for the processors of the nodes."""
    pattern = any_of("no match for platform", "exec format error")
    return _unpulled(snapshot, "{image} is not built for the processors of the nodes", pattern, ())


@failure(
    "no-such-tag",
    seen="containers that wait with ErrImagePull or ImagePullBackOff",
    remedy="Build and push it (`make image push IMAGE={image}`), or set an image that exists: `image` "
    "in the run file, or in the platform's values.",
)
def no_such_tag(snapshot: Snapshot) -> Match | None:
    """The registry has no image of that name and tag."""
    pattern = any_of(
        "not found", "manifest unknown", "name unknown", "does not exist", "code = NotFound",
        "couldn't parse image", "is not present with pull policy of Never", "InvalidImageName",
    )  # fmt: skip
    return _unpulled(snapshot, "there is no image {image}", pattern)


@failure(
    "image-not-pulled",
    seen="containers that wait with ErrImagePull or ImagePullBackOff, for any other reason",
    remedy="Pull {image} by hand on a node (`crictl pull`): it says more.",
)
def image_not_pulled(snapshot: Snapshot) -> Match | None:
    """A node cannot pull the image, for another reason."""
    reasons = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
    return _unpulled(snapshot, "a node cannot pull {image}", "", reasons)
