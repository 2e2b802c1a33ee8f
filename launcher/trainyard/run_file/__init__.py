"""The run file: its strict models, the YAML reader, `--set`, and what travels with it (code, network, queue).

`load` is the entry: it reads the file (`yaml_text`), applies `overrides`, and has `validation` check the
result against `models`. `code/` packs the code of the run.
It may import `trainyard_trainer.config` and `trainyard_trainer.run_files`, and no other room.
"""
