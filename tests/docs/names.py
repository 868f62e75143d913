"""Names that the examples of the README and of docs use and do not define, with their types.

`check_examples.py` imports from here what an example leaves undefined.
"""

import datetime as datetime
from collections.abc import Callable
from typing import Any

import torch
from torch import nn as nn
from torch.utils.data import DataLoader, Dataset

import outlast
from outlast import inprocess as inprocess
from outlast.elastic import ModuleState as ModuleState
from outlast.elastic import OptimizerState as OptimizerState
from outlast.elastic import RandomState as RandomState
from outlast.elastic import load_all_states as load_all_states
from outlast.elastic import save_all_states as save_all_states

best: Any
call: inprocess.CallWrapper
call_wrapper: inprocess.CallWrapper
checkpoint: dict[str, Any]
d: torch.nn.Module
dataset: Dataset[Any]
ema: torch.nn.Module
evaluate: Callable[[], None]
example_inputs: list[torch.Tensor]
example_outputs: list[torch.Tensor]
features: torch.Tensor
first_step: int
g: torch.nn.Module
images: torch.Tensor
inputs: torch.Tensor
job: outlast.Job
labels: torch.Tensor
last_step: int
loader: DataLoader[Any]
loss_fn: torch.nn.CrossEntropyLoss
make_model: Callable[[], torch.nn.Module]
make_stage: Callable[[int], torch.nn.Module]
meter: Any
make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]
model: torch.nn.Module
module: torch.nn.Module
optimizer: torch.optim.Optimizer
scheduler: torch.optim.lr_scheduler.LRScheduler
save: Callable[[dict[str, Any]], None]
stage: int
targets: torch.Tensor
teacher: torch.nn.Module
train_step: Callable[[], None]
