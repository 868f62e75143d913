"""`python -m outlast.launch` is the `outlast` command."""

from outlast.launch.cli import main

main()
