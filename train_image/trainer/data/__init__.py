"""From a data set to batches: `sources` writes Parquet once, a loader reads it in every epoch."""
