"""What people do around a run: compare, plan and report. A run by itself loads nothing of it."""
