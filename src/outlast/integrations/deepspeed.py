"""DeepSpeed: its checkpoints as verified background saves, and its restart in place.

DeepSpeed makes and reads the same state dicts as for its own files (ZeRO 0 to 3). They go through
a `CheckpointEngine` to an `outlast.Checkpointer`, which copies them, and writes them in the
background. A checkpoint becomes visible when the files of all ranks are durable.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from outlast.async_checkpoint import Checkpointer, SaveHandle
from outlast.elastic.stop_signals import SIGNALS, StopSignals
from outlast.errors import CheckpointError, CheckpointMismatch
from outlast.integrations.common import (
    not_importable,
    pack,
    set_generators,
    unpack,
    with_generators,
)

try:
    import deepspeed
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partition_parameters import Init
except ImportError as e:
    raise not_importable("deepspeed", "deepspeed", e) from e

__all__ = ["BackgroundCheckpointEngine", "DeepSpeedCheckpoints", "reset"]

_TAG = _CLIENT_STATE = "outlast"


def reset() -> None:
    """Prepares DeepSpeed for a restart in place: call it at the top of the wrapped function.

    DeepSpeed remembers the process groups of the process for as long as it runs. With ZeRO 3 it
    also numbers the parameters and modules through all models of the process: a survivor would
    continue where its last model ended, a replacement begin at 0, and the ranks would disagree.
    This resets both. On CPUs it also disables DeepSpeed's own collectives in shared memory, which
    wait in native code, where no abort reaches them.
    """
    deepspeed.comm.comm.cdb = None
    deepspeed.utils.groups._release_process_group_references()
    Init.param_id = Init.num_persisted_parameters = Init.num_persisted_elements = 0
    Init.apply_param_persistence = False
    parameter_offload.FWD_MODULE_STACK.clear()  # a fault may have interrupted a forward pass
    # The count of modules is the default value of a parameter.
    number_modules = parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module
    for default in number_modules.__defaults__ or ():
        if isinstance(default, list):
            default[:] = [0]
    if deepspeed.accelerator.get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class BackgroundCheckpointEngine(CheckpointEngine):
    """DeepSpeed's interface for files of checkpoints, on a `Checkpointer`.

    `save` collects the files of this rank, and `commit` schedules the save, with the random
    generators of this rank. `load` returns what `DeepSpeedCheckpoints.restore` has read. `step` is
    that of the save that DeepSpeed begins next, `layout` what a restore must have in common with
    it, `handle` that of the last save; `loaded` has the packed files of the restored checkpoint, by
    name.
    """

    def __init__(self, checkpointer: Checkpointer) -> None:
        super().__init__()
        self.name = type(self).__name__
        self.checkpointer = checkpointer
        self.step = 0
        self.handle: SaveHandle | None = None
        self.loaded: dict[str, Any] = {}
        self.layout = ""
        self._files: dict[str, Any] = {}

    def create(self, info: Any) -> None:
        self._files = {}

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Does nothing: the checkpointer makes its folders."""

    def save(self, state_dict: Any, path: str) -> None:
        self._files[os.path.basename(path)] = pack(state_dict)

    def commit(self, info: Any) -> bool:
        files, self._files = self._files, {}
        state = {"files": files, "layout": self.layout}
        state = with_generators(state, self.checkpointer.rank)
        self.handle = self.checkpointer.save(self.step, state)
        return True

    def load(self, path: str, map_location: Any = None) -> Any:
        name = os.path.basename(path)
        if not self.loaded.get(name):
            raise CheckpointError(
                f"DeepSpeed asks for {name}, which is not among the files that this rank has "
                f"restored ({', '.join(self.loaded) or 'none'}): load checkpoints by "
                "DeepSpeedCheckpoints.restore()"
            )
        return unpack(self.loaded[name])

    def preserves_storage_sharing(self) -> bool:
        """Each tensor is saved without the rest of its storage: DeepSpeed need not clone it."""
        return False


class DeepSpeedCheckpoints:
    """Saves and restores a DeepSpeed engine. All ranks call the same methods in the same order.

    With ZeRO, the world size must be that of the save, as with DeepSpeed's own checkpoints, which
    `engine.save_checkpoint` still makes. Restoring unpickles what DeepSpeed pickled, which may run
    code: use folders that you trust.

    Args:
        engine: the result of `deepspeed.initialize`.
        path: the folder, or a URL.
        signals: the signals on which `step` saves and exits, as for `Job`.
        arguments: those of `outlast.Checkpointer`, except `overlap`: DeepSpeed's optimizers do not
            say which tensors they change.

    Raises:
        ValueError: if the engine saves more than its state dicts: mixture-of-experts layers,
            `PipelineModule`, an optimizer offloaded to NVMe.
    """

    def __init__(
        self,
        engine: Any,
        path: str | os.PathLike[str],
        *,
        signals: Iterable[int] = SIGNALS,
        **arguments: Any,
    ) -> None:
        _check_supported(engine)
        if "overlap" in arguments:
            raise ValueError("overlap: not available with DeepSpeed; leave the argument out")
        self.engine = engine
        self.checkpointer = Checkpointer(path, **arguments)
        self._files = BackgroundCheckpointEngine(self.checkpointer)
        self._stop = StopSignals(self.checkpointer, signals=signals)

    def save(self, client_state: Mapping[str, Any] | None = None) -> SaveHandle:
        """Saves the engine as it is now, in the background, as step `engine.global_steps`.

        Args:
            client_state: more to save; `restore` returns it. That of one rank is saved.

        Raises:
            CheckpointError: if an earlier save failed, as `Checkpointer.save`.
        """
        self._files.step, self._files.layout = int(self.engine.global_steps), self._layout()
        # Under a name of its own: DeepSpeed puts it over its own states, such as the optimizer's.
        state = {_CLIENT_STATE: dict(client_state or {})}
        with self._own_files() as folder:
            # Into the folder, DeepSpeed copies only its script for converting its own files.
            self.engine.save_checkpoint(folder, tag=_TAG, client_state=state, save_latest=False)
        assert self._files.handle is not None
        return self._files.handle

    def step(self, client_state: Mapping[str, Any] | None = None) -> None:
        """Call it after each `engine.step()`, before a save that is due. If a rank was told to stop
        by a signal, all ranks save after the same step, and exit.

        Args:
            client_state: more to save then, as for `save`.

        Raises:
            SystemExit: after the last save, if the training was told to stop.
            CheckpointError: if a save failed.
        """
        if self.engine.is_gradient_accumulation_boundary():
            self._stop.completed(int(self.engine.global_steps), lambda: self.save(client_state))

    def restore(self, step: int | None = None) -> dict[str, Any] | None:
        """Loads the newest valid checkpoint, or that of `step`, and this rank's random generators.

        Returns:
            The client state; `None` if there is no checkpoint. `engine.global_steps` is the step.

        Raises:
            CheckpointMismatch: if the checkpoint is of another ZeRO stage or, with ZeRO, of another
                number of ranks; says what to do.
            CheckpointError: if there are checkpoints but none is valid.
        """
        with self._own_files() as folder:
            model = self.engine._get_ckpt_name(folder, _TAG)
            paths = [model]
            if self.engine.zero_optimization():
                paths.append(self.engine._get_zero_ckpt_name(folder, _TAG))
            files: dict[str, Any] = {os.path.basename(path): {} for path in paths}
            state = with_generators({"files": files, "layout": ""}, self.checkpointer.rank)
            # Not strict: with another layout there are other files, and names do not say why.
            found = self.checkpointer.restore(state, step=step, strict=False)
            if found is None:
                self._stop.begin(int(self.engine.global_steps), self.save)
                return None
            if state["layout"] not in ("", now := self._layout()):  # older ones have none
                raise CheckpointMismatch(
                    f"the checkpoint of step {found} was saved with {state['layout']}, "
                    f"and the engine has {now}: DeepSpeed partitions the optimizer's state in "
                    "another way. Continue as it was saved; or, for another number of ranks, "
                    "restore it as it was saved, call engine.save_checkpoint(folder), and convert "
                    "that with deepspeed.checkpoint.ds_to_universal"
                )
            self._files.loaded = files
            # DeepSpeed looks for its model file by name before it asks the engine for it.
            Path(model).parent.mkdir(parents=True)
            Path(model).touch()
            try:
                loaded, client_state = self.engine.load_checkpoint(folder, tag=_TAG)
            finally:
                self._files.loaded = {}
            if loaded is None:
                raise CheckpointError(f"DeepSpeed did not load the checkpoint of step {found}")
            set_generators(state, self.checkpointer.rank)
            saved = dict(client_state[_CLIENT_STATE])
        self._stop.begin(int(self.engine.global_steps), lambda: self.save(saved))
        return saved

    @contextlib.contextmanager
    def _own_files(self) -> Iterator[str]:
        """A folder whose files DeepSpeed saves and loads through the checkpointer. Outside of this,
        the program may save and load DeepSpeed's own files, also its universal ones.
        """
        engine, config = self.engine, self.engine._config
        before = engine.checkpoint_engine, config.load_universal_checkpoint
        engine.checkpoint_engine, config.load_universal_checkpoint = self._files, False
        try:
            with tempfile.TemporaryDirectory(prefix="outlast-deepspeed-") as folder:
                yield folder
        finally:
            engine.checkpoint_engine, config.load_universal_checkpoint = before

    def _layout(self) -> str:
        """What decides which files there are, and what is in them."""
        stage, ranks = int(self.engine.zero_optimization_stage()), self.checkpointer.world_size
        bf16 = ", bf16" if self.engine.bfloat16_enabled() else ""
        return f"ZeRO stage {stage}{bf16}, {ranks} ranks" if stage else "no ZeRO"

    def close(self) -> None:
        """Waits for saves in progress, and restores the handlers of signals.

        Raises:
            CheckpointError: if a save failed.
        """
        self._stop.close()
        self.checkpointer.close()


def _check_supported(engine: Any) -> None:
    refused = {
        "mixture-of-experts layers": engine.has_moe_layers,
        "a PipelineModule": isinstance(engine.module, deepspeed.pipe.PipelineModule),
        "an optimizer that is offloaded to NVMe": bool(engine.zero_nvme_offload_optimizer()),
    }
    for what, present in refused.items():
        if present:
            raise ValueError(
                f"DeepSpeedCheckpoints does not support {what}: use engine.save_checkpoint"
            )
