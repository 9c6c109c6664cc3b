"""OpenTelemetry: spans and metrics from decision records."""
