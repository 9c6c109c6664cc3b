"""From an engine's streams to its profile."""
