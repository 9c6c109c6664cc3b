"""The choice of worker and the order of the queue: QUARTZ, BF-IO, the simple ones. Pure."""
