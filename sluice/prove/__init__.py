"""`sluice prove`."""
