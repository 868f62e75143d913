"""Copies of tensors in shared memory: how they are taken and laid out."""
