"""What the frameworks' own pages do after a training: python after_training.py FRAMEWORK FOLDER.

Prints the name of each method that was called, as `called NAME`.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

FOLDER = Path(sys.argv[2])
RANK = int(os.environ.get("RANK", "0"))


def call(name: str, function: Callable[[], Any]) -> Any:
    found = function()
    os.write(1, f"called {name}\n".encode())
    return found


def total(state: Any) -> str:
    return sum(each.double().sum().item() for each in state.values()).hex()


def transformers() -> None:
    from trainer_runs import Text
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    from outlast.integrations.transformers import JobTrainer

    config = GPT2Config(vocab_size=26, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    config.bos_token_id = config.eos_token_id = 0
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    options: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "report_to": []}
    arguments = TrainingArguments(str(FOLDER), max_steps=4, save_steps=2, **options)
    trainer = JobTrainer(model=model, args=arguments, train_dataset=Text(64), eval_dataset=Text(16))
    result = trainer.train()
    call("save_model", lambda: trainer.save_model(str(FOLDER / "model")))
    call("save_model to output_dir", trainer.save_model)
    call("save_state", trainer.save_state)
    call("save_metrics", lambda: trainer.save_metrics("train", result.metrics))
    call("evaluate", trainer.evaluate)
    call("predict", lambda: trainer.predict(Text(16)))
    call("create_model_card", trainer.create_model_card)
    if RANK == 0:
        call("save_pretrained", lambda: model.save_pretrained(FOLDER / "pretrained"))
        for name in ("model", "pretrained", "."):
            loaded = GPT2LMHeadModel.from_pretrained(FOLDER / name)
            assert total(loaded.state_dict()) == total(model.state_dict()), name


def lightning() -> None:
    import lightning.pytorch as pl

    from outlast.integrations.lightning import JobCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 2)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

        test_step = validation_step

        def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    pl.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
    loader = DataLoader(data, batch_size=4)
    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        max_epochs=2,
        callbacks=[JobCallback(f"{FOLDER}/job", every=2)],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=FOLDER,
    )
    trainer.fit(module, loader, loader)
    call("validate", lambda: trainer.validate(module, loader, verbose=False))
    call("test", lambda: trainer.test(module, loader, verbose=False))
    call("predict", lambda: trainer.predict(module, loader))
    call("save_checkpoint", lambda: trainer.save_checkpoint(FOLDER / "last.ckpt"))
    loaded = torch.load(FOLDER / "last.ckpt", weights_only=False)["state_dict"]
    assert total(loaded) == total(module.state_dict())


def accelerate() -> None:
    from accelerate import Accelerator

    from outlast.integrations.accelerate import make_job

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
    accelerator = Accelerator(cpu=True)
    model: Any = nn.Linear(4, 2)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    loader: Any = DataLoader(data, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with make_job(accelerator, FOLDER / "job", every=2) as job:
        accelerator.load_state()
        for _ in job.epochs(2):
            for inputs, labels in job.batches(loader):
                accelerator.backward(functional.cross_entropy(model(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()
                job.step()
    logits = torch.cat([accelerator.gather_for_metrics(model(inputs)) for inputs, _ in loader])
    assert len(logits) == len(data)
    accelerator.wait_for_everyone()
    call("save_model", lambda: accelerator.save_model(model, str(FOLDER / "model")))
    state = call("get_state_dict", lambda: accelerator.get_state_dict(model))
    whole = call("unwrap_model", lambda: accelerator.unwrap_model(model))
    assert total(state) == total(whole.state_dict())
    call("save", lambda: accelerator.save(state, FOLDER / "state.pt"))
    call("end_training", accelerator.end_training)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    globals()[sys.argv[1]]()
    call("all", lambda: None)
