"""Prove axes: check that a small module does what the whole one does with the dropped units zeroed."""
