"""Files of a run: their paths, how they appear, how they are watched, cached and checked."""
