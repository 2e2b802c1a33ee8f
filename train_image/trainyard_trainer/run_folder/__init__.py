"""The folder of a run: every path and record in it, and which attempt may write to it.

`folder` has the paths of all files. `ownership/` has the lease, and `measurements/` the numbers of the run.
The other modules each own one record: logs, failures, the code, the submission and the run itself.
"""
