"""Fault drills and soaks: strike a small run on a real cluster with a fault, and measure what that cost.

The CLI imports this room. It uses the submission and cluster rooms.
"""
