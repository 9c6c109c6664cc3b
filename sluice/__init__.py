"""The sluice command: one file or folder per verb."""
