"""Bit-identical training: ordered gradient sums and the state of random generators."""
