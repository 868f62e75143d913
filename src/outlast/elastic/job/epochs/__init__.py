"""Epochs and passes over loaders: where a job is in them, and how it continues."""
