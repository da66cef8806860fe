"""Servers that were there before the worker, at an address of the recipe: what they must be, and the pictures they are sent."""
