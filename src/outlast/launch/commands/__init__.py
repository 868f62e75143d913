"""The sub-commands of `outlast`, one module each."""
