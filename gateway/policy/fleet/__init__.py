"""What the gateway knows of a pool's workers, and the simplest choice among them."""
