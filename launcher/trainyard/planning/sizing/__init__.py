"""Sizing: compute the number and the size of a run's pods, and suggest sizes where one is impossible."""
