"""What a run will take, before it is run: tasks by device and submodel, stragglers, choices, and each algorithm's times."""
