"""Looking at a run, live or afterwards, from its files alone."""
