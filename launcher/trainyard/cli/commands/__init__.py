"""The commands, in one folder for each group of `trainyard --help`; `trainyard.cli.app` lists them.

A command module imports only what its options need; what does the work is imported inside the command.
"""
