"""The QUARTZ paper's tables and scenes, in virtual time."""
