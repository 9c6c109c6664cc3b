"""What OpenTelemetry costs, and whether all spans arrive."""
