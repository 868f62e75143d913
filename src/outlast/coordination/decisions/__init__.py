"""The decision about the next iteration: its records, and the pure functions that make them."""
