"""Manage a run's life: signals, checkpoints, resume, divergence, export, and the environment that its bits depend on."""
