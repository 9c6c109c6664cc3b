"""`sluice simulate`."""
