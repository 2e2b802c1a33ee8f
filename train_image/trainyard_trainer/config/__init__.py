"""The config of a run: the sections of a run file that the trainer reads.

The launcher imports this room, so it needs only the standard library and pydantic.
"""
