"""Runs and tools on this machine: the training program as a child process, and the results in a run's folder.

The CLI, the Python API and sweeps import this room. It never talks to a cluster.
"""
