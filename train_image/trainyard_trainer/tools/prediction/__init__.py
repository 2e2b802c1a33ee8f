"""Predictions of a saved model, for the command `predict`, the Python API and the export.

`classifier` labels images, `chat` answers prompts, and `own_prediction` runs a user's recipe.
Whole files go through Ray Data: `predict_data` labels the images of Parquet files, which `prediction_input`
reads and `batch_prediction` writes, and `predict_prompts` answers the prompts that `prompt_file` reads.
"""
