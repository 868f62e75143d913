"""The sub-commands of `outlast`, a module each; `register(app)` adds one."""
