"""Define, write and read the run folder."""
