"""Measures the costs of checksums, authentication and encryption on links."""
