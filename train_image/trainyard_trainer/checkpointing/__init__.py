"""Checkpoints: save, verify, choose, retain and resume; whole files and sharded formats."""
