"""Compare, plan and report runs; a run by itself loads nothing of this package."""
