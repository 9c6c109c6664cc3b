"""Half an hour of mixed load: what is left behind, what grows."""
