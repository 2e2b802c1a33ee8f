"""Sweeps: train one run for each combination of values of a run file, on a cluster or on this machine.

Only the CLI imports this package.
"""
