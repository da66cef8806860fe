"""`python -m relax_hpc` is `relax-hpc`."""

from relax_hpc.cli import app

app(prog_name="relax-hpc")
