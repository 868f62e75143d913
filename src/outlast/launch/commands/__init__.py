"""The subcommands of `outlast`, one module each."""
