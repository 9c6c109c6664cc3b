"""BF-IO's tables and figures, and what a gateway can have of them."""
