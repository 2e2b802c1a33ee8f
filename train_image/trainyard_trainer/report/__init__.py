"""The HTML report of a run: the frame of the page, charts, and the verdict on what limits the run's speed.

Recipes add sections of their own; this room does not know them.
"""
