"""Data sets: sources, preparation into Parquet, and loading into batches.

`prepared` is the format of a prepared data set, `stored_rows` writes and reads its rows, and `image_codec`
reads and writes picture files; the three rooms below build on them.
"""
