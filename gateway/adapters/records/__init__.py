"""Where decisions, audit lines and usage are written."""
