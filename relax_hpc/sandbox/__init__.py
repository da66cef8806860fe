"""Sandboxes without root: commands that run apart from the run, the home folder, each other and the network.

recipe: sandbox = {kind, …} ─► wrap ─► [warden: limits, leaves nothing behind] ─► [bwrap | Landlock | apptainer | enroot] ─► command

`wrap` and the others lie in relax_hpc.sandbox.wrap: this file stays empty, since the warden begins with it.
"""
