"""The writer process, and the main process's side of it."""
