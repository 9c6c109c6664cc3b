"""The composition root: builds a serving process from a configuration."""
