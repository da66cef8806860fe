"""What the processes of all roles have: heartbeat, signals, ranks, GPUs, compile caches."""
