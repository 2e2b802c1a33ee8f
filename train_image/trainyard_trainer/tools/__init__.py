"""Command-line tools in the image and on a laptop: data, checkpoints, export, predict, compare, folder.

Nothing imports this room; the launcher starts its modules as programs.
"""
