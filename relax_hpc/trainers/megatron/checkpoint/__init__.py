"""Megatron-core's distributed checkpoints: index, state, optimizer moments."""
