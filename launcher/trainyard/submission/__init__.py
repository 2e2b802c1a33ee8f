"""Submissions: create, watch, suspend, resume, stop and list RayJobs, and read a run's folder from outside.

It uses the cluster only through the `Cluster` interface of the `cluster` room.
"""
