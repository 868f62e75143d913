"""Data at any number of replicas: loader, sampler, stream."""
