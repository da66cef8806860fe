"""The tables of a recipe, one module each: every key's meaning, default and bounds."""
