"""Commands that show what is on a cluster: runs, logs, GPUs, pods, files and the platform."""
