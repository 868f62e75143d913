"""One round: the launchers of its job one after another, and the checks in the end."""
