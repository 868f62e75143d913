"""Progress of the function: timestamps, heartbeats, timeouts."""
