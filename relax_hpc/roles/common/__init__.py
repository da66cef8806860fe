"""Shared by the processes of all roles: heartbeat, signals, ranks, GPUs, compile caches."""
