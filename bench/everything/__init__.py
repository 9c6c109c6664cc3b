"""Everything on against everything off: the same engines, the same trace, ablations."""
