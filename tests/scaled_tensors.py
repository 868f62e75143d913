"""A tensor subclass that wraps two tensors, as quantized weights and 8-bit moments do."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

aten = torch.ops.aten


class Scaled(torch.Tensor):
    """Integers of 8 bits, and a scale. Operations on it use its value, except for copies."""

    content: torch.Tensor
    scale: torch.Tensor
    kind: str

    @staticmethod
    def __new__(cls, content: torch.Tensor, scale: torch.Tensor, kind: str = "") -> Scaled:
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        made: Scaled = make(cls, content.shape, dtype=torch.float32, strides=content.stride())
        made.content, made.scale, made.kind = content, scale, kind
        return made

    @classmethod
    def of(cls, value: torch.Tensor, kind: str = "") -> Scaled:
        scale = value.abs().max().clamp(min=1e-6) / 127
        return cls((value / scale).round().to(torch.int8), scale, kind)

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, str]]:
        return ["content", "scale"], {"kind": self.kind}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Any], about: dict[str, str], *_: Any) -> Scaled:
        return cls(inner["content"], inner["scale"], about["kind"])

    def value(self) -> torch.Tensor:
        return self.content.to(torch.float32) * self.scale

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.value()})"

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0]
        if function in (aten.detach.default, aten.clone.default, aten.alias.default):
            return cls(function(first.content), function(first.scale), first.kind)
        if function is aten._to_copy.default:
            return cls(first.content.clone(), first.scale.clone(), first.kind)
        if function is aten.copy_.default and isinstance(first, cls):
            source = args[1] if isinstance(args[1], cls) else cls.of(args[1], first.kind)
            first.content.copy_(source.content)
            first.scale.copy_(source.scale)
            return first

        def plain(value: Any) -> Any:
            return value.value() if isinstance(value, Scaled) else value

        return function(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


class Momentum8(torch.optim.Optimizer):
    """SGD with a momentum that is a `Scaled`, made in the first step."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                state = self.state[each]
                if not state:
                    state["momentum"] = Scaled.of(torch.zeros_like(each), "momentum")
                momentum = 0.9 * state["momentum"].value() + each.grad
                state["momentum"].copy_(momentum)
                each.sub_(group["lr"] * momentum)
