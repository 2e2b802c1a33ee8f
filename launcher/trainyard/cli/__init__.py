"""The command line of `trainyard`: the commands, their options, and what they print.

Heavy imports stay inside the commands, so that `--help` answers at once. Only `__main__` imports this room.
"""
