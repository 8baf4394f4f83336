"""Define a federated run: its records, an algorithm's five parts, the global state, and the coordinator that processes events."""
