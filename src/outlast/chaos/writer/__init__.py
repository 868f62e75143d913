"""Faults in the writer process: its program under a plan, and its connection to the injector."""
