"""The worker processes of a job."""
