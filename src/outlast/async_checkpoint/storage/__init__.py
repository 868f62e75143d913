"""Where checkpoints are kept, and what their directories contain. No module imports torch."""
