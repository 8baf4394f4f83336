"""Show a run to an operator's tools: metrics for Prometheus, a health check, spans for OpenTelemetry."""
