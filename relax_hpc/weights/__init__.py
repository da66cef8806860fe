"""Weights: versions of the policy on their way from the trainer to the rollout workers."""

from relax_hpc.weights.base import DamagedWeights, Publisher, Receiver, Version, WeightsError
from relax_hpc.weights.file import FilePublisher, FileReceiver

__all__ = ["DamagedWeights", "FilePublisher", "FileReceiver", "Publisher", "Receiver", "Version", "WeightsError"]
