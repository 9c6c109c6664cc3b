"""The sluice command: one file a verb."""
