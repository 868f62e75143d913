"""The recovery of a rank: session, state machine, rank host, admission, views, launcher notices."""
