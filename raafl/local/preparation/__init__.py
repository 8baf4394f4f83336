"""Prepare the user's module before a run: refuse what cannot be copied, add missing steps, try a batch."""
