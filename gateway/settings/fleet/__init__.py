"""Models, their pools of engines, and the workers in each pool."""
