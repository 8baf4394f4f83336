"""The contract with the run folder: what a run leaves behind, who writes it, and how it is read again."""
