"""Writes a program as a Python file, as a person would write it."""

from __future__ import annotations

from collections.abc import Callable

from .parts import Program

_HEAD = '''\
"""{choices}"""
import contextlib, logging, random
from concurrent.futures import ThreadPoolExecutor
import numpy, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler
import outlast
from outlast import inprocess
import kit
from kit import probe, record

torch.set_num_threads(1)
'''


class _Lines:
    """Lines with their indentation."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def add(self, *texts: str) -> None:
        self.lines += [f"{'    ' * self.depth}{text}" for text in texts]

    def block(self, head: str, body: Callable[[], None]) -> None:
        self.add(head)
        self.depth += 1
        body()
        self.depth -= 1


class _Writer:
    """Writes one program."""

    def __init__(self, program: Program) -> None:
        self._has = program
        self._out = _Lines()

    def _is(self, part: str, *choices: str) -> bool:
        return self._has[part] in choices

    def text(self) -> str:
        """The program."""
        add = self._out.add
        self._out.lines += _HEAD.format(choices=", ".join(
            f"{part}: {choice}" for part, choice in self._has.items()
        )).splitlines()  # fmt: skip
        if self._is("bar", "tqdm"):
            add("from tqdm import tqdm")
        if self._is("loop", "trainer"):
            self._trainer()
        add("", "")
        limits = "soft_timeout=20.0, hard_timeout=30.0"
        add(f"@inprocess.Wrapper({limits})")
        self._out.block("def train():", self._leaving)
        add("", "", 'if __name__ == "__main__":')
        add(f"    with kit.handlers({self._has['handlers']!r}):")
        add("        train()")
        return "\n".join(self._out.lines) + "\n"

    def _trainer(self) -> None:
        """A class that hides the loop, with callbacks."""
        add = self._out.add
        add(
            "",
            "",
            "class Trainer:",
            "    def __init__(self, job, loader, on_batch, on_epoch_end, may_go_on):",
            "        self.job, self.loader = job, loader",
            "        self.on_batch, self.on_epoch_end = on_batch, on_epoch_end",
            "        self.may_go_on = may_go_on",
            "",
            "    def fit(self, epochs):",
            "        for epoch in self.job.epochs(epochs):",
            "            self.run_epoch(epoch)",
            "            self.on_epoch_end(epoch)",
            "            if not self.may_go_on():",
            "                break",
            "",
            "    def run_epoch(self, epoch):",
            "        for number, batch in enumerate(self.job.batches(self.loader)):",
            "            if self.on_batch(epoch, number, batch) is False:",
            "                break",
        )

    # ------------------------------------------------------------------------- around the job

    def _leaving(self) -> None:
        out = self._out
        out.add('dist.init_process_group("gloo")')
        if self._is("leaving", "plain"):
            self._set_up()
            out.add("dist.destroy_process_group()")
            return
        out.block("try:", self._set_up)
        if self._is("leaving", "finally_barrier"):
            out.add("finally:", "    dist.barrier()", "    dist.destroy_process_group()")
        elif self._is("leaving", "finally_destroy"):
            out.add("finally:", "    dist.destroy_process_group()")
        else:
            out.add(
                "except Exception:",
                '    logging.exception("training failed")',
                "    raise",
                "dist.destroy_process_group()",
            )

    def _set_up(self) -> None:
        out, has = self._out, self._has
        add = out.add
        add(f"model = kit.model({has['layers']!r})")
        if self._is("parallel", "fsdp2"):
            add(
                "from torch.distributed.fsdp import fully_shard",
                "for layer in model:",
                "    if list(layer.parameters()): fully_shard(layer)",
                "ddp = fully_shard(model)",
            )
        else:
            add("ddp = nn.parallel.DistributedDataParallel(model)")
        rate = "weight_decay=0.01" if self._is("optimizer", "adamw") else "momentum=0.9"
        name = "AdamW" if self._is("optimizer", "adamw") else "SGD"
        if self._is("optimizer", "two"):
            add(
                "first = torch.optim.SGD(model[0].parameters(), 0.005, momentum=0.9)",
                "rest = [p for layer in model[1:] for p in layer.parameters()]",
                "optimizers = {'first': first, 'rest': torch.optim.AdamW(rest, 0.01)}",
            )
        else:
            add(f"optimizers = {{'all': torch.optim.{name}(model.parameters(), 0.005, {rate})}}")
        add("optimizer = next(iter(optimizers.values()))")
        add("loader = " + self._loader())
        # The DDP, as docs/elastic.md has it: the sums of three ranks keep their order.
        given = "model" if self._is("parallel", "fsdp2") else "ddp"
        add("states = {}" if self._is("ema", "averaged") else f"states, models = {{}}, {given}")
        if self._is("scheduler", "step", "epoch"):
            add("scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)")
            add("states['scheduler'] = scheduler")
        if self._is("scheduler", "plateau"):
            add("scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)")
            add("states['scheduler'] = scheduler")
        if self._is("ema", "own"):
            add("ema = states['ema'] = kit.Ema(model)")
        if self._is("ema", "averaged"):
            add("ema = torch.optim.swa_utils.AveragedModel(model)")
            add(f"models = {{'model': {given}, 'ema': ema}}")
        if not self._is("evaluation", "no"):
            add("best = states['best'] = kit.Value(value=float('inf'), step=-1, bad=0)")
        if self._is("log", "each_epoch"):
            add("sums = states['sums'] = kit.Value(loss=0.0, n=0)")
        if self._is("compile", "eager"):
            add("forward = torch.compile(ddp, backend='eager')")
        else:
            add("forward = ddp")
        if self._is("data", "elastic"):
            add("own_loader = loader")
        else:
            add("own_loader = None")
        out.block(
            "with outlast.Job(kit.CHECKPOINTS, model=models, optimizer=optimizers, "
            "loader=own_loader, states=states, every=5) as job, contextlib.ExitStack() as stack:",
            self._job,
        )

    def _loader(self) -> str:
        workers = ""
        if not self._is("workers", "none"):
            workers = ", num_workers=2"
            if self._is("workers", "spawn", "forkserver"):  # each imports torch
                workers = f", num_workers=1, multiprocessing_context={self._has['workers']!r}"
            if self._is("workers", "persistent"):
                workers += ", persistent_workers=True"
        if self._is("data", "elastic"):
            batch = "global_batch_size=kit.BATCH * dist.get_world_size()"
            return f"outlast.elastic.ElasticLoader(kit.Data(), {batch}, drop_last=True{workers})"
        if self._is("data", "drawn"):
            return "None"
        if self._is("data", "iterable"):
            return f"DataLoader(kit.Stream(), kit.BATCH, drop_last=True{workers})"
        each = "kit.SAMPLES // dist.get_world_size()"
        if not self._is("inputs", "even"):
            each += " - kit.BATCH * (dist.get_rank() == 1)"
        sampler = {
            "distributed": "DistributedSampler(data := kit.Data())",
            "own_sampler": f"kit.OwnSampler(each := {each})",
            "random_sampler": "RandomSampler(data := kit.Data(), "
            "generator=torch.Generator().manual_seed(5 + dist.get_rank()), "
            f"num_samples={each})",
        }[self._has["data"]]
        data = "data" if "data :=" in sampler else "kit.Data(each + dist.get_world_size())"
        batches = f"batch_size=kit.BATCH, drop_last=True{workers}"
        return f"DataLoader(sampler=({sampler}), dataset={data}, {batches})"

    # ---------------------------------------------------------------------------- in the job

    def _job(self) -> None:
        out = self._out
        if not self._is("evaluation", "no"):
            out.block("def evaluate():", self._evaluate)
        if not self._is("log", "no"):
            out.add("log = job.text_file(kit.OUT / 'log.csv')")
        if self._is("evaluation", "after_steps"):
            out.add("job.after_steps(4, evaluate)")
        out.add("job.restore()")
        if self._is("scheduler", "after_restore"):
            out.add(
                "scheduler = torch.optim.lr_scheduler.LambdaLR(",
                "    optimizer, lambda n: 0.97 ** n, last_epoch=job.steps - 1)",
            )
        if self._is("helper", "daemon", "not_daemon"):
            is_daemon = self._is("helper", "daemon")
            out.add(f"stack.enter_context(kit.background({is_daemon}))")
        if self._is("helper", "pool"):
            out.add("pool = stack.enter_context(ThreadPoolExecutor(2))")
        if self._is("inputs", "join"):
            out.add("stack.enter_context(ddp.join())")
        {"batches": self._batches, "trainer": self._use_trainer, "plain": self._plain}[
            self._has["loop"]
        ]()
        # A checkpoint has the statistics of a batch norm as rank 0 has them.
        out.add(
            "whole = dist.get_rank() == 0 or not any(True for _ in model.buffers())",
            "weights = ddp.state_dict() if whole else dict(ddp.named_parameters())",
            "everything = dict(model=weights, steps=job.steps)",
        )
        out.add(
            "everything.update({f'optimizer {n}': o.state_dict() for n, o in optimizers.items()})",
            "everything.update({f'state {n}': s.state_dict() for n, s in states.items()})",
        )
        if self._is("ema", "averaged"):
            out.add("everything['average'] = ema.state_dict()")
        out.add("kit.done(**kit.generators(), **everything)")

    def _plain(self) -> None:
        self._out.block("for step in range(job.steps, kit.STEPS):", self._plain_body)

    def _plain_body(self) -> None:
        self._out.add("x = torch.randn(kit.BATCH, 8)", "number = step")
        self._out.add("batch = x, x.sum(1, keepdim=True), torch.arange(kit.BATCH)")
        self._body("break")

    def _batches(self) -> None:
        self._out.block("for epoch in job.epochs(kit.EPOCHS):", self._epoch)

    def _epoch(self) -> None:
        out = self._out
        source = "job.batches(loader)"
        if self._is("bar", "tqdm"):
            source = f"tqdm({source})"
        out.block(f"for number, batch in enumerate({source}):", lambda: self._body("break"))
        self._epoch_end()
        if self._is("stopping", "epochs"):
            out.add("if best.bad >= 2:", "    break")

    def _epoch_end(self) -> None:
        out = self._out
        out.add("probe('epoch_end', job.steps)")
        if self._is("evaluation", "epoch"):
            out.add("value = evaluate()")
        if self._is("scheduler", "epoch"):
            out.add("scheduler.step()")
        if self._is("scheduler", "plateau"):
            out.add("scheduler.step(value)")
        if self._is("log", "each_epoch"):
            out.add("print(epoch, job.steps, sums.loss, sums.n, sep=',', file=log)")
            out.add("sums.loss, sums.n = 0.0, 0")
        if not (self._is("evaluation", "epoch") or self._is("log", "each_epoch")):
            out.add("record('epoch', epoch, job.steps)")

    def _use_trainer(self) -> None:
        out = self._out
        out.block("def on_batch(epoch, number, batch):", self._callback)
        out.block("def on_epoch_end(epoch):", self._epoch_end)
        may = "best.bad < 2" if self._is("stopping", "epochs") else "True"
        source = "loader"
        out.add(f"Trainer(job, {source}, on_batch, on_epoch_end, lambda: {may}).fit(kit.EPOCHS)")

    def _callback(self) -> None:
        self._body("return False")

    def _body(self, leave: str) -> None:
        """The body of the loop over batches."""
        out = self._out
        add = out.add
        add("probe('top', job.steps)")
        if self._is("stopping", "body"):
            add(f"if job.steps >= kit.STEPS - 5:\n{'    ' * (out.depth + 1)}{leave}")
        add("x, y, indices = batch")
        if self._is("random", "rank_0"):
            add("if dist.get_rank() == 0:", "    torch.randn(3)")
        if self._is("random", "numpy"):
            add("x = x + float(numpy.random.rand()) / 100 + random.random() / 100")
        if self._is("evaluation", "before"):
            add("if job.steps % 4 == 0:", "    evaluate()")
        if self._is("accumulate", "no"):
            add("for o in optimizers.values(): o.zero_grad()")
            self._backward()
        else:
            add("parts = list(zip(x.chunk(2), y.chunk(2)))")
            add("for o in optimizers.values(): o.zero_grad()")
            out.block("for part, (x, y) in enumerate(parts):", self._accumulated)
        add("probe('before_step', job.steps)")
        if self._is("clip", "norm"):
            add("nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)")
        if self._is("helper", "pool"):
            add("assert pool.submit(sum, range(10)).result() == 45")
        add("for o in optimizers.values(): o.step()")
        if self._is("scheduler", "step", "after_restore"):
            add("scheduler.step()")
        if self._is("ema", "own"):
            add("ema.update(model)")
        if self._is("ema", "averaged"):
            add("ema.update_parameters(model)")
        if self._is("log", "each_epoch"):
            add("sums.loss += kit.mean_over_ranks(loss)", "sums.n += 1")
        add("record('samples', job.steps, indices.tolist())")
        add("probe('in_step', job.steps)")
        add("job.step()")
        add("probe('rest', job.steps)")
        if self._is("log", "each_step"):
            add("print(job.steps, kit.mean_over_ranks(loss).hex(), sep=',', file=log)")
        if self._is("evaluation", "rest"):
            add("if job.steps % 4 == 0:", "    evaluate()")
        add("probe('end', job.steps)")

    def _backward(self) -> None:
        self._out.add(
            "loss = ((forward(x) - y) ** 2).mean()",
            "probe('forward', job.steps)",
            "loss.backward()",
            "record('loss', job.steps, loss.item().hex())",
        )

    def _accumulated(self) -> None:
        out = self._out
        if self._is("accumulate", "no_sync_2"):
            out.block(
                "with ddp.no_sync() if part == 0 else contextlib.nullcontext():", self._backward
            )
        else:
            self._backward()

    def _evaluate(self) -> None:
        out = self._out
        out.add("probe('evaluation_begins', job.steps)", "model.eval()")
        out.add(
            "with torch.no_grad():",
            "    x = torch.randn(16, 8)",
            "    loss = ((ddp(x) - x.sum(1, keepdim=True)) ** 2).mean()",
            "model.train()",
            "value = kit.mean_over_ranks(loss)",
            "record('evaluation', job.steps, value.hex())",
            "probe('evaluation', job.steps)",
        )
        if self._is("log", "with_evaluation"):
            out.add("print(job.steps, value.hex(), sep=',', file=log)")
        out.block("if value < best.value:", self._better)
        out.add("else:", "    best.bad += 1")
        out.add("probe('evaluation_ends', job.steps)", "return value")

    def _better(self) -> None:
        out = self._out
        out.add("best.value, best.step, best.bad = value, job.steps, 0")
        if self._is("best", "metric"):
            out.add("job.save(metric=value)")
        if self._is("best", "file"):
            out.add("kit.write_best(value, model)")


def source(program: Program) -> str:
    """The text of the program."""
    return _Writer(program).text()
