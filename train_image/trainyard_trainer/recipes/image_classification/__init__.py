"""The recipe `image_classification`: model, loss, metrics and its part of the report."""
