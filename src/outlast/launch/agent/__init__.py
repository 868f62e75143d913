"""The agent: it sees workers end, decides what follows, and replaces the dead."""
