"""Adapters for training frameworks: one module per framework, each with an extra of its own.

- `outlast.integrations.lightning`: a callback and a `CheckpointIO` for Lightning's Trainer.
- `outlast.integrations.transformers`: a Trainer of Hugging Face's transformers.
- `outlast.integrations.accelerate`: a `Job` of what an `Accelerator` has prepared.
- `outlast.integrations.deepspeed`: background checkpoints of a DeepSpeed engine.
- `outlast.integrations.torchtitan`: a checkpoint manager for torchtitan's trainer.

Importing this package imports no framework. Importing one of its modules without the framework
raises an `ImportError` that names the extra to install.
"""
