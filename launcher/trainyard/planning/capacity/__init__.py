"""Capacity: what nodes have, what runs on them, and whether a run fits on them and into the quotas.

The functions are pure: they work on parsed Node, Pod and ResourceQuota objects.
"""
