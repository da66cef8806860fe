"""A run in simulated time, before it is paid for: rollout workers, trainer, staleness, long tails, faults.

recipe + what one assumes, or a run's own metrics ──► Times ──► simulate (the real RequestPlanner decides) ──► Outcome ──► sweep
"""
