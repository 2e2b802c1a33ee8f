"""The known failures that `explain` looks for, one module for each part of the system that can fail.

To add one, append an entry to the module's list and a snapshot under
`tests/launcher/snapshots/`. Only `diagnosis` imports this room.
"""
