"""What a `FiniteCheck` finds, and how it is said."""

from __future__ import annotations

import dataclasses

from outlast.system.units import listed


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one rank found after `step`: values that were finite after `since`. See `order`."""

    step: int
    since: int
    rank: int
    host: str
    origin: str  # "loss", "gradients" or "parameters"
    names: list[str]
    loss: str = ""
    ranks: int = 1  # how many have found the same
    huge: str = ""

    @property
    def order(self) -> tuple[int, int, int]:
        """A loss is computed before the gradients, and these before the parameters."""
        return self.step, ("loss", "gradients", "parameters").index(self.origin), self.rank


def describe(finding: Finding) -> str:
    """A finding in a sentence."""
    huge = f"; its {finding.huge}" if finding.huge else ""
    where, names = f"rank {finding.rank} on {finding.host}", listed(finding.names)
    if finding.origin == "loss":
        more = f", and so are values of {names}" if names else ""
        return f"after step {finding.step}: the loss of {where} is {finding.loss}{more}{huge}"
    if finding.origin == "gradients":
        return (
            f"after step {finding.step}: values of {names} are not finite, first in the gradients "
            f"of {where}{huge}"
        )
    if finding.ranks > 1:  # it came with the gradients, which all ranks have averaged
        where += f" and {finding.ranks - 1} more"
    since = "" if finding.since >= finding.step - 1 else f"; they were after step {finding.since}"
    return f"after step {finding.step}: values of {names} on {where} are not finite{since}{huge}"
