"""Hosts on this machine, in network namespaces: for the rounds in which one of them is cut off."""
