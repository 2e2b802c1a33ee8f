"""The recipe `gradient_boosting`: a run without a network, whose trees XGBoost or LightGBM grow."""
