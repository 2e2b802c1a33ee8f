"""The environment variable that says how the worker processes of a Ray start."""

LOCAL_RAY_VARIABLE = "TRAINYARD_LOCAL_RAY"
"""docs/explanation/performance.md describes its values. The chart sets it in the pods of workers."""
