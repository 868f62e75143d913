"""The store protocol and its implementations."""
