"""Predict a run before it starts: tasks by device and submodel, stragglers, choices, and each algorithm's times."""
