"""Gradient boosting with XGBoost or LightGBM.

The package replaces the PyTorch training loop (`engine`) and shares its attempts, checkpoints and records.
"""
