"""Lightning's Trainer: a callback that makes its fits survive faults, and a `CheckpointIO`."""

from outlast.integrations.common import not_importable

try:
    import lightning.pytorch  # noqa: F401
except ImportError as e:
    raise not_importable("lightning", "lightning", e) from e

from outlast.integrations.lightning.checkpoint_io import BackgroundCheckpointIO
from outlast.integrations.lightning.job_callback import JobCallback

__all__ = ["BackgroundCheckpointIO", "JobCallback"]
