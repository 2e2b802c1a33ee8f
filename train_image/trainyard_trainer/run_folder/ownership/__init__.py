"""Which attempt may write to the run's folder, and which of its worker groups.

An attempt takes the `lease` when it starts. The `fence` stops every older attempt and worker group that still
runs. `claim_holder` finds out whether the process that took the lease is alive.
"""
