"""State and health of a pool's workers, and the simplest choice among them."""
