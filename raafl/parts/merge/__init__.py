"""Merge waiting updates into the global model. Every merge works on submodels: it changes only what an update covers."""
