"""Copies of a run's metrics for TensorBoard, Weights & Biases and ClearML; messages about what happens to it."""

LIBRARIES = {"tensorboard": "tensorboard", "wandb": "wandb", "clearml": "clearml", "notify": "apprise"}
"""Tool -> module that is imported for it; the extra `tracking` installs all."""
