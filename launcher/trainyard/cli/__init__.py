"""The commands of `trainyard`: each one loads its input, calls what does the work, and shows the result.

Heavy imports stay inside the commands, so that `--help` answers at once. Only `__main__` imports this room.
"""
