"""Environments that come with relax_hpc: a calculator, Python, a shell, a search, a picture's details, games."""
