"""`sluice plan` and `sluice whatif`."""
