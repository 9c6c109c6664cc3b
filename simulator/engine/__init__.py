"""The engine model: continuous batching over a paged KV cache; the clock is an argument."""
