"""State that replicas share through Redis, and their fallback while Redis is away."""
