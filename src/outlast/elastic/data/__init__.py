"""Data loading that continues at any number of replicas: loader, sampler, stream."""
