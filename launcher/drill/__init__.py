"""Drills: a small run is struck by a fault on a real cluster, and what that cost is measured."""
