"""The training as a user of each system writes it. Each is started by that system's launcher."""
