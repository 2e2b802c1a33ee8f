"""Fault drills and soaks: inject faults into a small run on a real cluster, and measure the cost.

Only the CLI imports this package. It uses the packages `submission` and `cluster`.
"""
