"""Adapters for training frameworks, each with an extra of its own.

Importing this package imports no framework. Importing one of its modules without the framework
raises an `ImportError` that names the extra to install.
"""
