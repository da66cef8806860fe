"""Before a run: how large it is, how long it takes, what would go wrong."""
