"""Leaving blocks out: windows of a stack, and exits that end a model early."""
