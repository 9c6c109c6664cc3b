"""The choice of pool: boundaries, the compression window, affinity, retries."""
