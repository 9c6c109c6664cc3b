"""BF-IO's tables and figures, and the part that a gateway can use."""
