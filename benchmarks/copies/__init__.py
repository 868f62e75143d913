"""Copies of snapshots in another host's memory: their cost, and the time after a host is lost."""
