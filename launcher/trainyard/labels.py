"""Labels by which trainyard recognises its own Kubernetes objects. `manifests/rayjob.yaml.j2` sets
them."""

from __future__ import annotations

DOMAIN = "trainyard.io/"
"""The prefix of all label and annotation keys that only trainyard sets."""

RUN_LABEL = f"{DOMAIN}run"
"""The label that holds the name of the run."""

OWNER_LABELS = {"app.kubernetes.io/managed-by": "trainyard"}
"""Labels of every object that trainyard creates."""
