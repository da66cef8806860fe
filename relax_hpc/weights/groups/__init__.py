"""Process groups that broadcast weights: gloo, MPI and NCCL behind one protocol."""
