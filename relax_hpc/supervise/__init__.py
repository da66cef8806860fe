"""Supervision: one supervisor per allocation starts the roles there, watches them, and restarts them."""
