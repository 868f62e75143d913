"""The error of an adapter whose framework is not installed."""

from __future__ import annotations


def not_installed(framework: str, extra: str) -> ImportError:
    """An error that says which extra to install."""
    return ImportError(
        f"outlast.integrations.{framework} needs the package {framework}, which is not installed: "
        f"pip install 'outlast[{extra}]'",
        name=framework,
    )
