"""Connections over TCP: streams, the listener, and the handshake that proves who calls."""
