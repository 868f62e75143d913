"""Restart in place."""
