"""Who may enter: the token pool of a model, checks, placement, limits, debt. Pure."""
