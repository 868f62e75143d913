"""Restores: from memory or storage, verified before a byte is believed."""
