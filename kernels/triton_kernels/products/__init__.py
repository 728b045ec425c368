"""Matrix products, fused operations between them, exchanges between ranks."""
