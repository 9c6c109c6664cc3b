"""`sluice import`: the configuration of another gateway -> sluice.yaml, and what became of it."""
