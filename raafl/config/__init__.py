"""Configure a run: the typed experiment, its options, parsing, and error messages."""
