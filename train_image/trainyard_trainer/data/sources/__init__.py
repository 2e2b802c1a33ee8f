"""Data sources: what kind of data set lies at a path, and how its samples are read."""
