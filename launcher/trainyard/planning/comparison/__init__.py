"""Comparison: list what differs between two RayJobs of a run, or two platforms, and what that affects."""
