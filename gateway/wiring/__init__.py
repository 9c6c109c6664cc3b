"""The composition root: configuration in, a serving process out."""
