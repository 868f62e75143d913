"""What may be the metric of a save: said at once, not by the commit in the background."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outlast.async_checkpoint import Checkpointer


@pytest.mark.parametrize(
    "metric", [2, np.float32(2), torch.tensor(2.0), torch.tensor([2.0]).requires_grad_()]
)
def test_a_number_of_any_kind(tmp_path: Path, metric: Any) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(2)}, metric=metric).result()
        assert [each.metric for each in checkpointer.checkpoints()] == [2.0]


@pytest.mark.parametrize("metric", ["2", torch.ones(2), {"loss": 2.0}])
def test_anything_else_is_refused_and_the_next_save_is_made(tmp_path: Path, metric: Any) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(TypeError, match="metric must be a number, not "):
            checkpointer.save(1, {"x": torch.ones(2)}, metric=metric)
        checkpointer.save(2, {"x": torch.ones(2)}).result()
        assert [each.step for each in checkpointer.checkpoints()] == [2]
