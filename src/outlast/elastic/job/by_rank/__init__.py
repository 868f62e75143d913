"""What may differ between the ranks of a job, and the check of what must be equal."""
