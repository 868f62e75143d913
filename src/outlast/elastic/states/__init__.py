"""`State` and its registry: AdaptDL's API, and the ready-made states."""
