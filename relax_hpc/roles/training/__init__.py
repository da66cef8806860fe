"""The trainer role: the loop, the controller on rank 0, and what the controller decides with."""
