"""Shared answers to the five questions, from which the algorithms are put together."""
