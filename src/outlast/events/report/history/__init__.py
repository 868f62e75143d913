"""What happened in a run: calls, iterations and stops, from its events."""
