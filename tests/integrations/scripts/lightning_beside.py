"""A fit with a data module, a CSV logger and a top-k ModelCheckpoint beside the JobCallback:
`outlast run lightning_beside.py FOLDER FAULT`. With a fault, rank 0 raises in its tenth step, once.
"""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from outlast import inprocess
from outlast.elastic import ElasticLoader
from outlast.integrations.lightning import JobCallback

FOLDER, FAULT = Path(sys.argv[1]), sys.argv[2] == "fault"


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        x = torch.randn(64, 4)
        self.data = TensorDataset(x, x.sum(1, keepdim=True))
        self.loader = ElasticLoader(self.data, global_batch_size=16)

    def train_dataloader(self) -> Any:
        return self.loader

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=16)


class Regression(pl.LightningModule):
    def __init__(self, raises: bool) -> None:
        super().__init__()
        self.net, self.raises = nn.Linear(4, 1), raises

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.raises and self.global_step == 9:
            raise RuntimeError("a fault")
        loss = functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@inprocess.Wrapper()
def main(call: inprocess.CallWrapper) -> None:
    pl.seed_everything(0, verbose=False)
    data = Data()
    best = ModelCheckpoint(
        FOLDER / "best", monitor="score", save_top_k=2, filename="{step}-{score:.8f}"
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=call.state.world_size,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=5,
        callbacks=[JobCallback(FOLDER / "job", loader=data.loader, call=call, every=100), best],
        logger=CSVLogger(FOLDER),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    raises = FAULT and call.iteration == 0 and call.state.rank == 0
    trainer.fit(Regression(raises), datamodule=data)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
