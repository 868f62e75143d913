"""Reaping of child processes, and the end of orphans."""
