"""Show a run to a person from the rows that it writes: within the run, or from its folder (`raafl watch`)."""
