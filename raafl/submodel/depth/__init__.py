"""Cut a model in depth: windows of a stack, and exits that end a model early."""
