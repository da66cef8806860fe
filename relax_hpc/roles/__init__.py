"""Roles: what the processes of a run do. Roles never call each other; they meet in the run directory."""
