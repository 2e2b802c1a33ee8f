"""The descriptions of data sets that `trainyard data inspect` prints: images, tokens and tables."""
