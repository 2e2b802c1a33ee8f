"""The warm process of a laptop: it has imported what a run imports, and keeps a Ray ready for the next run.

`server` is the warm process, which `trainyard warm up` starts. For each run it forks a fork server
(`run_processes`), which forks the driver (`driver`) and, later, the workers. The driver starts its Ray at
once, and waits for a run. So each run has processes and a Ray of its own, which end with it, and the warm
process sees no run.
"""
