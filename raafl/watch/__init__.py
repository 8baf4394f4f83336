"""Show a run to a person from the rows that it writes: live, or from its folder (`raafl watch`)."""
