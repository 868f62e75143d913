"""A job on many hosts: how its agents, one on each host, find each other and stay in agreement."""
