"""The embedded lease store: in memory, for one process."""
