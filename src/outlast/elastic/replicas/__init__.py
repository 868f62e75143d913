"""The replicas of a job, and how they act together."""
