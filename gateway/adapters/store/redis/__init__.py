"""State shared by replicas through Redis, and what a replica does without it."""
