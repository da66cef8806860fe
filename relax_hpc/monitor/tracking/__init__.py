"""Copies of a run's metrics for TensorBoard, Weights & Biases and ClearML; messages about what happens to it."""

LIBRARIES = {"tensorboard": "tensorboard", "wandb": "wandb", "clearml": "clearml", "notify": "apprise"}
"""Tool -> what is imported for it; the extra `tracking` brings all."""
