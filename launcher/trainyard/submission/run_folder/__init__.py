"""The run's folder on the cluster's storage, seen from outside.

`remote_folder` reads and writes it by commands in a pod, whose bytes `transfer` carries; `reader_pod` starts
such a pod for a run without a head. `kept_logs` chooses among the logs of the folder, and `reproduce` renders
the RayJob again from its records.
"""
