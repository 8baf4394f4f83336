"""Secure aggregation: the server reads sums over clients only (docs/secure-aggregation.md)."""
