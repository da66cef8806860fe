"""Roles that read shards and publish columns: scorers and the critic."""
