"""Find axes: follow a training step through its operations, and group the dimensions that must shrink together."""
