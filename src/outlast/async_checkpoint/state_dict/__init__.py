"""What a state dict consists of, and which rank saves which part of it."""
