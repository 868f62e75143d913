"""Restores: from memory or storage, every byte is verified before it is used."""
