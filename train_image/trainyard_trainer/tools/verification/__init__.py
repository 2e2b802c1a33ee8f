"""The checks of `trainyard verify`: whether a recipe may be trusted to the engine."""
