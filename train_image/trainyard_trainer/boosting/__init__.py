"""Gradient boosting with XGBoost or LightGBM: another engine, with the same attempts and checkpoints."""
