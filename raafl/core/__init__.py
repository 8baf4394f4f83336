"""What a federated run is: its records, its algorithm's five parts, its state, and the loop over events."""
