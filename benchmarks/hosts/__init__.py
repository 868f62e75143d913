"""Benchmarks of jobs on many hosts."""
