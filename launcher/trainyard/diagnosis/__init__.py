"""Diagnosis: `explain` names one cause and one remedy for a run that does not do what it should; `preflight`
checks a cluster before a run takes GPUs.

`gather` and `probe` ask the cluster; everything else is pure and works on a snapshot. The known failures
are in `causes/`. The CLI and `run.py` import this room.
"""
