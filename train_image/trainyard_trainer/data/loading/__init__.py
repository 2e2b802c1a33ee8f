"""Loading: batches of a prepared data set for each worker, by the torch loader or by Ray Data."""
