"""The rollout role: claims requests, runs their episodes, publishes shards."""
