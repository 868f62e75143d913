"""Elastic state: the cost of resuming, saving, resharding and bit-identical training.

Each result is compared with the usual PyTorch way, measured alternately in the same run: see
`data`, `state`, `registry`, `resharding` and `consistent`.
"""

from __future__ import annotations

from typing import Any

from benchmarks.checkpoint.training_state import QUICK, SHARE
from benchmarks.elastic import consistent, data, registry, resharding, state
from benchmarks.elastic.sheets import sheets

__all__ = ["run", "sheets"]


def run(quick: bool) -> dict[str, Any]:
    """Runs all measurements."""
    if quick:
        return {
            "position": data.position(10**8, 1),
            "loader": data.loading(2_000, 64, 1),
            "skipping": data.skipping(20, 64, 1),
            "state": state.measure(QUICK, 1),
            "registry": registry.measure(QUICK, 1),
            "resharding": resharding.measure(QUICK, ((2, 1), (1, 2)), 1),
            "consistent": consistent.measure(1, (4,), (1, 2), 2, 1),
        }
    return {
        "position": data.position(10**8, 200),
        "loader": data.loading(16_000, 64, 9),
        "skipping": data.skipping(2_000, 64, 5),
        "state": state.measure(SHARE, 5),
        "registry": registry.measure(SHARE, 5),
        "resharding": resharding.measure(SHARE, ((4, 2), (2, 4)), 5),
        "consistent": consistent.measure(4, (4, 8), (1, 2, 4), 5, 5),
    }
