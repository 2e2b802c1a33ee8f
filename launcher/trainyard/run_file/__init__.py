"""The run file: its strict models, the YAML reader, `--set`, and what travels with it (code, network, queue).

It may import `trainyard_trainer.config` and `trainyard_trainer.run_files`, and no other room.
"""
