"""Connect clients over TCP: TLS 1.3 with a certificate at each end, streams, the listener, rate limits."""
