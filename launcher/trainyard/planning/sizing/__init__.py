"""Sizing: how many pods a run gets, how large they are, and which sizes are possible where one is not."""
