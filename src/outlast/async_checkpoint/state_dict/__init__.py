"""The parts of a state dict, and which rank saves which part."""
