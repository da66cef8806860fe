"""Submission: a plan becomes batch scripts, and batch scripts become jobs."""
