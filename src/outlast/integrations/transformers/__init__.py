"""Hugging Face's Trainer: a subclass, and a mixin for your own subclasses, that survive faults."""

from outlast.integrations.common import not_importable

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ImportError as e:
    raise not_importable("transformers", "transformers", e) from e

from outlast.integrations.transformers.job_trainer import JobTrainer, JobTrainerMixin, PingCallback

__all__ = ["JobTrainer", "JobTrainerMixin", "PingCallback"]
