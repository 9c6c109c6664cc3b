"""The embedded lease store: in memory, one process."""
