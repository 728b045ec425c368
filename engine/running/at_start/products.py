"""Matrix products that no table has: measured as a node starts, before it serves and graphs hold their plans."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch

from tandem.kernels.products.tuning.run import missing, tune_missing

logger = logging.getLogger(__name__)


class WarmsUp(Protocol):
    """What measuring needs of a runner."""

    @property
    def device(self) -> torch.device: ...

    def warmup(self) -> None: ...


def warm_up_tuned(runner: WarmsUp, budget_s: float, doing: Callable[[str], object]) -> None:
    """Runs `runner.warmup`, from which it is known which products there are. Where this kind of device has no table of
    them they are measured for `budget_s` seconds, and what new plans need is warmed up, too."""
    runner.warmup()
    if runner.device.type != "cuda":
        return
    if not (lacking := missing(runner.device)):
        return
    number = len({product for _, product in lacking})
    if not budget_s:
        logger.info(
            "%d matrix products are in no table for this device: `tandem kernels --tune MODEL` makes one", number
        )
        return
    doing("measuring matrix products")
    logger.info("measuring %d matrix products for up to %g s (--tune-products-s)", number, budget_s)
    if tune_missing(runner.device, budget_s):
        runner.warmup()
