"""Elastic state."""
