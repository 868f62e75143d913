"""A plain training loop, written as nanoGPT's script is, that survives faults.

    outlast run --nproc-per-node 2 examples/ports/nanogpt.py

The loop draws random batches, accumulates gradients, evaluates every few steps and follows a
learning rate schedule. For `outlast` it is a function with the decorator, and a `Job` takes the
place of its own checkpoint code. The text is synthetic: a walk through the alphabet.
"""

import argparse
import math
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import outlast
from outlast import inprocess

vocab_size, block_size, n_embd, n_head, n_layer, dropout = 26, 16, 32, 2, 2, 0.1
batch_size = 8
gradient_accumulation_steps = 4  # over all ranks
eval_interval, eval_iters = 10, 2
learning_rate, min_lr, warmup_iters, grad_clip = 1e-3, 1e-4, 5, 1.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = nn.Linear(n_embd, 3 * n_embd)
        self.proj = nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        heads = self.attn(self.ln_1(x)).view(b, t, 3 * n_head, c // n_head).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(b, t, c)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*(Block() for _ in range(n_layer)))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        logits = self.lm_head(self.ln_f(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_text(length: int, seed: int) -> torch.Tensor:
    """Letters that usually follow each other in the alphabet."""
    generator = torch.Generator().manual_seed(seed)
    jumps = torch.randint(0, vocab_size, (length,), generator=generator)
    steps = torch.where(torch.rand(length, generator=generator) < 0.9, 1, jumps)
    return steps.cumsum(0) % vocab_size


data = {"train": make_text(20_000, 1), "val": make_text(2_000, 2)}


def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    ix = torch.randint(len(data[split]) - block_size, (batch_size,))
    x = torch.stack([data[split][i : i + block_size] for i in ix])
    y = torch.stack([data[split][i + 1 : i + 1 + block_size] for i in ix])
    return x, y


@torch.no_grad()
def estimate_loss(model: nn.Module) -> dict[str, float]:
    model.eval()
    out = {}
    for split in ("train", "val"):
        losses = [model(*get_batch(split)).item() for _ in range(eval_iters)]
        out[split] = sum(losses) / eval_iters
    model.train()
    return out


def get_lr(it: int, max_iters: int) -> float:
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / max(1, max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@inprocess.Wrapper()
def main(out_dir: Path, max_iters: int, call: inprocess.CallWrapper | None = None) -> None:
    assert call is not None
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    micro_steps = gradient_accumulation_steps // world_size
    torch.manual_seed(1337 + rank)  # each rank draws its own batches

    raw_model = GPT()
    model = DDP(raw_model)  # before `restore`: it gives all ranks the same initial weights
    optimizer = torch.optim.AdamW(raw_model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    job = outlast.Job(out_dir, model=model, optimizer=optimizer, every=eval_interval)
    with job:
        iter_num = job.restore()
        while iter_num < max_iters:
            call.ping()
            for group in optimizer.param_groups:
                group["lr"] = get_lr(iter_num, max_iters)
            if iter_num % eval_interval == 0:
                with call.long_phase(600):  # no pings for up to ten minutes
                    losses = estimate_loss(raw_model)
                if rank == 0:
                    print(f"eval {iter_num}: train {losses['train']:.4f}, val {losses['val']:.4f}")
            lossf = 0.0
            for micro_step in range(micro_steps):
                X, Y = get_batch("train")
                last = micro_step == micro_steps - 1
                with nullcontext() if last else model.no_sync():
                    loss = model(X, Y) / micro_steps
                    loss.backward()
                lossf += loss.item()
            nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            iter_num += 1
            print(f"iter {iter_num}: loss {lossf!r}", flush=True)
            job.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out-dir", type=Path, default=Path("out"))
    parser.add_argument("--max-iters", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    main(options.out_dir, options.max_iters)
