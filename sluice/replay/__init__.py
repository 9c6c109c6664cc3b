"""`sluice replay`."""
