"""Preparation: write a source as shuffled, checked Parquet files, resumable after a kill."""
