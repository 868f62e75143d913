"""The same bits at any number of replicas: gradients and random generators."""
