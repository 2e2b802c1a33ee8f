"""What the commands about submitted runs look up of a run, in words too; see `trainyard.run`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from trainyard.cli.options import platform_of
from trainyard.run import head_of as head_of
from trainyard.run import last_job as last_job
from trainyard.run import no_run as no_run
from trainyard.run import summary_of as summary_of

if TYPE_CHECKING:
    from trainyard.cluster.cluster import Cluster
    from trainyard.submission.remote_folder import RemoteFolder


def folder_of(
    cluster: Cluster, name: str, head: str | None = None
) -> AbstractContextManager[RemoteFolder]:
    """The run's folder, through its head where there is one; says whose platform tells where it is."""
    from trainyard.submission.reader_pod import open_folder

    platform = platform_of(None, True, cluster.namespace, cluster)
    return open_folder(cluster, platform, name, head)
