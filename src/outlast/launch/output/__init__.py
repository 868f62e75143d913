"""The output of the workers and of the launcher."""
