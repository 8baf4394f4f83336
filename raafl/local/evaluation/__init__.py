"""Record what a module logs, and evaluate it by its own validation and test steps."""
