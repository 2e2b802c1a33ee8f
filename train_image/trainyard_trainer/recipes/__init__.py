"""Recipes: the interface between the engine and a kind of task, the registry, and the built-in recipes.

To add one, add a folder and an entry of `registry.RECIPES`.
"""
