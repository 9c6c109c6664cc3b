"""Half an hour of mixed load: leftovers and growth."""
