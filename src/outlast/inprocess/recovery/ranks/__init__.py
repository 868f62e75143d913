"""The ranks of the next iteration: assignment, filters, and the values that policies exchange."""
