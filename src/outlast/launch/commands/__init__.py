"""The subcommands of `outlast`; `run` is in `cli.py`."""
