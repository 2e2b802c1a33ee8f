"""Sources of images: files, idx files, manifests and columns of Parquet."""
