"""Names and formats that launcher and trainer share: files of a run's folder, protocol words, exit codes.

`programs/` starts Python programs, and `warm/` has what `trainyard warm` and its clients share.

The launcher imports this room, so it needs only the standard library and pydantic.
"""
