"""torchtitan: a checkpoint manager that saves in the background and restores only verified data.

It implements torchtitan's `BaseCheckpointManager`, and saves the states that the trainer passes to
it, under the names that torchtitan's own manager uses, and the random generators of each rank. On
SIGTERM, SIGINT, SIGUSR1 and SIGHUP, all ranks save after the same step, and exit with 143.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from outlast.async_checkpoint import Checkpointer, Retention
from outlast.elastic.stop_signals import StopSignals
from outlast.integrations.common import OPTIONAL, not_importable, set_generators, with_generators

try:
    from torchtitan.components.checkpointer.base import (
        DATALOADER,
        LR_SCHEDULER,
        MODEL,
        OPTIMIZER,
        BaseCheckpointManager,
        ModelWrapper,
    )
except ImportError as e:
    raise not_importable("torchtitan", "torchtitan", e) from e

__all__ = ["OutlastCheckpointManager"]

log = logging.getLogger("outlast.checkpoint")


class OutlastCheckpointManager(BaseCheckpointManager):
    """Checkpoints of a torchtitan `Trainer`, through an `outlast.Checkpointer`.

    The arguments are those that the trainer passes.

    Attributes:
        after_step: called after each step, on all ranks, before a save that is due: set it to
            `call.ping` of the wrapped function.

    Raises:
        ValueError: for settings that need torchtitan's own manager; names them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's settings, and some of the `Checkpointer`'s."""

        replicas: int = 0
        """1 keeps a copy of each rank's snapshot in another host's memory."""

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            own = {
                "last_save_model_only": self.last_save_model_only,
                "last_save_in_hf": self.last_save_in_hf,
                "initial_load_in_hf": self.initial_load_in_hf,
                "initial_load_path": self.initial_load_path,
                # Each of these, and `enable`, is in some versions only.
                "create_seed_checkpoint": getattr(self, "create_seed_checkpoint", False),
                "purge_exempt": getattr(self, "purge_exempt", None),
            }
            used = [name for name, value in own.items() if value]
            if getattr(self, "enable", True) and used:
                raise ValueError(
                    f"OutlastCheckpointManager does not support {', '.join(used)}: set them to "
                    "False or None, and use torchtitan's CheckpointManager to import and export"
                )

    after_step: Callable[[], object] | None = None

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = getattr(config, "enable", True)
        self.save_future: Future[Any] | None = None
        if not self.enable:
            return
        self._config = config
        self.states = {
            **states,
            MODEL: ModelWrapper(model_parts),
            OPTIMIZER: optimizers,
            DATALOADER: dataloader,
            LR_SCHEDULER: lr_schedulers,
        }
        unknown = [name for name in config.exclude_from_loading if name not in self.states]
        if unknown:
            raise ValueError(f"exclude_from_loading: there are no states {', '.join(unknown)}")
        self.checkpointer = Checkpointer(
            os.path.join(base_folder, config.folder),
            keep=Retention(last=config.keep_latest_k) if config.keep_latest_k else None,
            replicas=config.replicas,
        )
        self._last = 0  # step that was completed
        self._stop = StopSignals(self.checkpointer)

    def load(self, step: int = -1) -> bool:
        """Restores `step`, or the newest valid checkpoint; False for a fresh start."""
        return self.enable and self._load(step)

    def _load(self, step: int = -1) -> bool:
        excluded = self._config.exclude_from_loading
        state = self._state_dict(excluded)
        wanted = None if step == -1 else step
        found = self.checkpointer.restore(
            state, step=wanted, strict=not excluded, optional=OPTIONAL
        )
        self._last = found or 0
        if found is None:
            log.info("no checkpoint in %s: a fresh start", self._config.folder)
        else:
            for name, stateful in self.states.items():
                if name == MODEL:  # its names stand beside those of the others
                    stateful.load_state_dict(state)
                elif stateful is not None and name not in excluded:
                    stateful.load_state_dict(state[name])
            set_generators(state, self.checkpointer.rank)
        self._stop.begin(self._last, self._save_now)
        return found is not None

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self.after_step is not None:
            self.after_step()
        self._last = curr_step
        self._stop.completed(curr_step, self._save_now)
        config = self._config
        first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (first or last_step or curr_step % config.interval == 0):
            return False
        self._save_now()
        if last_step:
            self.maybe_wait_for_saving()
        return True

    def _save_now(self) -> None:
        self.save_future = self.checkpointer.save(self._last, self._state_dict())

    def _maybe_wait_for_staging(self) -> None:
        """Does nothing: `save` returns when the state is copied."""

    def _wait_for_saving(self) -> None:
        assert self.save_future is not None
        future, self.save_future = self.save_future, None
        future.result()

    def _close(self) -> None:
        self._stop.close()
        self.checkpointer.close()

    def _unused(self, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError("the Checkpointer finds, verifies and removes its checkpoints")

    # Abstract in versions after 0.3, whose base class calls them from its own `load`.
    _load_checkpoint = _is_valid_checkpoint = _is_resumable_checkpoint = _unused

    def _state_dict(self, excluded: list[str] | None = None) -> dict[str, Any]:
        state = {
            name: stateful.state_dict()
            for name, stateful in self.states.items()
            if name != MODEL and stateful is not None and name not in (excluded or ())
        }
        state |= self.states[MODEL].state_dict()
        return with_generators(state, self.checkpointer.rank)
