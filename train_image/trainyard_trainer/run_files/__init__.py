"""Names and formats that launcher and trainer share: files of a run's folder, protocol words, exit codes.

The launcher imports this room, so it needs only the standard library and pydantic.
"""
