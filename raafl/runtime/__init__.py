"""What drives the loop: the clocks, the wire, and the run folder."""
