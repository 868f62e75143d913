"""Checks that the ranks of a `Job` begin with equal models: a checkpoint contains one copy.

Each rank writes a part of the checkpoint. If the ranks initialized their models differently, the
initial checkpoint would be a mixture of all of them, and a restart from it would silently train
another model. DDP gives all ranks the parameters of rank 0, but only when it wraps the model, which
a program may do after `Job.restore`.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.collectives import least


def check_equal_on_all_ranks(module: nn.Module, ledger: CallLedger, group: Any) -> None:
    """Compares the tensors that several ranks hold under one name. Collective.

    Raises:
        ValueError: on all ranks, if one differs; names it, on a rank where it differs.
    """
    mine = {
        name: _digest(tensor)
        for name, tensor in module.state_dict().items()
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor)
    }
    first = json.loads(ledger.agree("initial model", json.dumps(mine)))
    different = next((n for n, digest in mine.items() if first.get(n, digest) != digest), None)
    no_rank = 1 << 62
    rank = least(no_rank if different is None else ledger.rank, group)
    if rank == no_rank:
        return
    if different is not None:
        where = f"{different!r} has other values on rank {ledger.rank} than on another rank"
    else:
        where = f"rank {rank} names a tensor in its own error"
    raise ValueError(
        "the ranks have different models before the first step, but a checkpoint contains one copy "
        f"({where}). Wrap the model in DistributedDataParallel before job.restore(), which gives "
        "all ranks the parameters of rank 0, or seed all ranks equally before creating the model"
    )


def _digest(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return xxhash.xxh3_64_hexdigest(content.numpy().data)
