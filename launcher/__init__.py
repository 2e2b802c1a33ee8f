"""The launcher: run file -> plan -> objects -> cluster -> progress."""
