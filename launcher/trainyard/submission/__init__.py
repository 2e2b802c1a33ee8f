"""Submissions: create, watch, suspend, resume, stop and list RayJobs, and read a run's folder from outside.

`status` says how a submission stands, from its RayJob alone; `submit`, `watch`, `control` and `overview`
build on it. `run_folder/` reads and writes the run's folder on the cluster's storage.
It uses the cluster only through the `Cluster` interface of the `cluster` room.
"""
