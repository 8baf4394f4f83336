"""Measure raafl's speed against hardware limits and other simulators; each result has its date and hardware."""
