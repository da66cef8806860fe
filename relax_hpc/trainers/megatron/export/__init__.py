"""Megatron-core's weights under the names of Hugging Face, and back."""
