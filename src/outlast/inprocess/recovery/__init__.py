"""The recovery state machine, and the host that carries out its steps in this process."""
