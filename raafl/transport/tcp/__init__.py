"""Connect clients over TCP: streams, the listener, rate limits, and the handshake that authenticates both ends."""
