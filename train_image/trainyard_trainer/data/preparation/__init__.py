"""Preparation: write a source as shuffled, checked Parquet files, resumable after a kill.

`run_data` chooses how the data of a run is prepared. `prepare` converts images and lines of text, by way of
`plan`, `splits`, `convert` and `split_writer`; `tokens/` prepares text for language models.
"""
