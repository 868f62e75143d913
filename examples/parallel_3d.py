"""Trains a small network with pipeline stages, tensor parallelism and FSDP2, and survives faults.

    outlast run --nproc-per-node 4 examples/parallel_3d.py

The ranks form a mesh: pipeline stages x data parallel replicas x tensor parallel parts. On 4 ranks
it has 2 stages of 2 ranks, which split each block between them by tensor parallelism. FSDP2 shards
the blocks over the replicas, and everything that tensor parallelism does not split (embedding,
norms, head) over all ranks of the stage. No parameter is stored twice, so a lost rank takes with it
a part of the model that only a checkpoint has. `--dp 2` on 8 ranks adds replicas.

What survives faults here is what a program with one kind of parallelism needs too: the decorator, a
ping per step, and a checkpointer. Stages name their parameters as the whole model does
(`layers.3...`), and the optimizer's state is saved under these names.
"""

import argparse
import datetime
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import outlast.inprocess as inprocess
from outlast.async_checkpoint import Checkpointer, Retention

VOCABULARY, WIDTH, LAYERS = 61, 32, 4
BATCH, LENGTH, MICROBATCHES = 16, 12, 4
# Under these options the names of an optimizer's state are those of the parameters. Otherwise the
# lists of its groups would have the same names on all stages, with other contents.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


class Block(nn.Module):
    """A norm and two linear layers, around which the input is added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


class Model(nn.Module):
    """Predicts the next token of each position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.norm: nn.Module | None = nn.LayerNorm(WIDTH)
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Runs the parts that this stage has."""
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        for layer in self.layers.values():
            hidden = layer(hidden)
        if self.norm is not None and self.head is not None:
            hidden = self.head(self.norm(hidden).flatten(0, 1))
        return hidden

    def keep_stage(self, stage: int, stages: int) -> None:
        """Removes the parts of all other stages. Those that remain keep their names."""
        for i in range(LAYERS):
            if i * stages // LAYERS != stage:
                del self.layers[str(i)]
        if stage != 0:
            self.embedding = None
        if stage != stages - 1:
            self.norm = self.head = None


def parallelize(model: Model, mesh: DeviceMesh, whole_stage: DeviceMesh) -> None:
    """Splits the blocks by tensor parallelism, and shards everything with FSDP2."""
    for block in model.layers.values():
        assert isinstance(block, Block)
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block.norm, mesh=whole_stage)
        fully_shard(block, mesh=mesh["dp"])
    for part in (model.embedding, model.norm, model.head):
        if part is not None:
            fully_shard(part, mesh=whole_stage)
    fully_shard(model, mesh=mesh["dp"])


def batch(step: int, replica: int, replicas: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of a step and their successors: they depend on the step alone, and each replica
    takes its share.
    """
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
    tokens = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    mine = tokens.chunk(replicas)[replica]
    return mine[:, :-1], mine[:, 1:]


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, tokens.flatten())


@inprocess.Wrapper(soft_timeout=inprocess.Adaptive(initial=20))
def train(options: argparse.Namespace, call: inprocess.CallWrapper | None = None) -> None:
    """Trains to the end, from the last checkpoint."""
    assert call is not None
    # Longer than the hard timeout: the wrapper ends collectives and sends in flight.
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    world_size = dist.get_world_size()
    ranks_of_stage = world_size // options.pp
    shape = (options.pp, options.dp, ranks_of_stage // options.dp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
    stages = init_device_mesh("cpu", (options.pp, ranks_of_stage), mesh_dim_names=("pp", "stage"))
    stage = mesh.get_local_rank("pp")
    is_first, is_last = stage == 0, stage == options.pp - 1

    torch.manual_seed(0)  # each rank makes the whole model, and keeps its part
    model = Model()
    model.keep_stage(stage, options.pp)
    parallelize(model, mesh, stages["stage"])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, foreach=False)
    pipeline = Schedule1F1B(
        PipelineStage(model, stage, options.pp, torch.device("cpu"), group=mesh.get_group("pp")),
        MICROBATCHES,
        loss_fn=loss_of,
    )

    checkpointer = Checkpointer(options.state, keep=Retention(last=2), overlap=optimizer)
    state = training_state(model, optimizer)
    first = checkpointer.restore(state)
    if first is None:
        optimizer.state.clear()  # `get_state_dict` created it with a step at a learning rate of 0
    else:
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=BY_NAME,
        )
    if dist.get_rank() == 0:
        print(f"iteration {call.iteration}: mesh {shape} from step {first or 0}", flush=True)

    for step in range(first or 0, options.steps):
        call.ping()
        tokens, targets = batch(step, mesh.get_local_rank("dp"), options.dp)
        losses: list[torch.Tensor] = []
        pipeline.step(
            *([tokens] if is_first else []),
            **({"target": targets, "losses": losses} if is_last else {}),
        )
        optimizer.step()
        optimizer.zero_grad()
        if is_last:
            loss = torch.stack(losses).mean().item()
            print(f"step {step + 1}: loss {loss!r}", flush=True)
        if (step + 1) % options.save_every == 0:
            with call.long_phase():  # on a slow disk it waits for the previous save
                checkpointer.save(step + 1, training_state(model, optimizer))
    checkpointer.close()
    dist.destroy_process_group()


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Model and optimizer of this stage, under the names that they have in the whole model."""
    model_state, optimizer_state = get_state_dict(model, optimizer, options=BY_NAME)
    return {"model": model_state, "optimizer": optimizer_state}


def main() -> None:
    """Parses the options, and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=20, help="steps between two saves")
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages")
    parser.add_argument("--dp", type=int, default=1, help="data parallel replicas")
    parser.add_argument("--state", type=Path, default=Path("parallel_3d"))
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks % (options.pp * options.dp):
        parser.error(
            f"{ranks} ranks are no multiple of {options.pp} stages x {options.dp} replicas"
        )
    torch.set_num_threads(1)
    train(options)


if __name__ == "__main__":
    main()
