"""The tables of a recipe, one module each: what every key means, its default, its bounds."""
