"""Turn an engine's recorded streams into its profile."""
