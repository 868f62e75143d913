"""Lightning's Trainer, on two ranks, that survives faults.

    outlast run --nproc-per-node 2 examples/ports/lightning_trainer.py

`outlast.integrations.lightning.JobCallback` saves and restores the module, the optimizer, the
scheduler, the loops and the position in the data. The data are synthetic.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from outlast import chaos, inprocess
from outlast.elastic import ElasticLoader
from outlast.integrations.lightning import JobCallback


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.1), nn.BatchNorm1d(32), nn.Linear(32, 2)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        chaos.step(self.global_step)  # so that a fault plan can name a step
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        print(f"step {self.global_step + 1}: loss {loss.item()!r}", flush=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 40, gamma=0.7)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@inprocess.Wrapper()
def main(path: Path, max_epochs: int, call: inprocess.CallWrapper | None = None) -> None:
    assert call is not None
    L.seed_everything(0, verbose=False)
    x = torch.randn(1024, 20)
    loader = ElasticLoader(TensorDataset(x, (x[:, :4].sum(1) > 0).long()), global_batch_size=64)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=call.state.world_size,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=max_epochs,
        callbacks=[JobCallback(path, loader=loader, every=10)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Classifier(), loader)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path, default=Path("lightning"))
    parser.add_argument("--max-epochs", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    main(options.path, options.max_epochs)
