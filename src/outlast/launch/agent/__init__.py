"""The process that watches the workers: decisions, replacement, shutdown, summary."""
