"""The monitor process: how it is started, and its loop."""
