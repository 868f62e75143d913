"""The registry of states (AdaptDL's API), their saves and loads, and the ready-made states."""
