"""Pictures of measurements, as SVG."""
