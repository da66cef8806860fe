"""Estimates how large a run is before it is sent: parameters, memory, bytes. Arithmetic on a recipe and a model's
config.json alone.
"""
