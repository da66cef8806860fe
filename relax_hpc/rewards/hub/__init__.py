"""Rewards that the field shares, by name: a recipe needs no code for them. Each states the definition that it follows."""
