"""The cost of a fault with and without the state of the ranks that survive it."""
