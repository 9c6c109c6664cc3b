"""`sluice tenant`."""
