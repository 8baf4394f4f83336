"""Protect any merge: guards against bad updates, and differential privacy."""
