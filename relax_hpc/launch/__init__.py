"""Launch: how a run gets its directory, its lease and its processes. Knows roles by their command line only."""
