"""A fleet that changes under streams: engines come and go, the configuration is reloaded."""
