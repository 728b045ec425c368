"""OpenTelemetry traces of requests."""
