"""OpenTelemetry: spans and GenAI metrics from decision records, sent over OTLP/HTTP."""
