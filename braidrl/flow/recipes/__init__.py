"""Recipes: one short file per algorithm. A recipe is a function from its parameters to a flow."""

from braidrl.flow.recipes.load import RECIPES, load_flow

__all__ = ["RECIPES", "load_flow"]
