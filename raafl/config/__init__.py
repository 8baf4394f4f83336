"""What a run is told: the typed experiment, its options, how they are read, and what is said where they are wrong."""
