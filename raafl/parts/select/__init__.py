"""Choose a submodel from axes, a rate or a budget, the state and a seed."""
