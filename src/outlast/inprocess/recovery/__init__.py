"""The recovery of a rank: session, state machine, rank host, waits, views, launcher notices."""
