"""Preflight: check that a cluster can run a job, before a run uses its GPUs.

`trainyard.diagnosis.probe` reads the facts from the cluster; the checks here are pure functions of them.
"""
