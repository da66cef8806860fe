"""`relax-hpc doctor`: finds what would go wrong with a run before it is sent.

recipe or run ► target ─┬► files    is the shared file system one that a run can live on, is there room
                        ├► python   does the Python of the nodes hold what the run needs
                        ├► slurm    does the cluster have what [slurm] asks for, in its own words
                        └► nodes    all of this, and GPUs and network, seen from nodes (a job; `probe` runs there)

`--file-system DIR` ► file_system: what a file system promises, from one node or two; no recipe
Every check is a row: ok, a warning, failed, or a note on what could not be looked at. Nothing is left behind.
"""
