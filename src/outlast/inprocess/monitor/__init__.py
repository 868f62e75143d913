"""The monitor process of a rank: its start, its event loop, timeouts, heartbeats and reports."""
