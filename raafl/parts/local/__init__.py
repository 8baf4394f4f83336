"""Provide hooks around the user's training step that several methods share."""
