"""Makes tables: measures products on this device within a time, and keeps what was found."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import time
from collections.abc import Callable, Iterable

import torch

from tandem.kernels.products import matmul, matmul_device
from tandem.kernels.products.tuning import stored
from tandem.kernels.products.tuning.candidates import (
    SHORT_LADDER,
    Kernel,
    Product,
    candidates,
    few_candidates,
    kernel_of,
    wanted,
)
from tandem.kernels.products.tuning.measured import DeviceMeasures, compile_kernel
from tandem.kernels.products.tuning.tuner import Times, Tuned, tune

logger = logging.getLogger(__name__)

LEAST_WEIGHTS = 12 << 20  # smaller products take a few microseconds by any plan; a guess

OnMeasured = Callable[[int, Product, Times], object]


def missing(device: torch.device) -> list[tuple[int, Product]]:
    """(rows, product) of what this process has asked for that no table measured on such a device has."""
    asked = [product for product in matmul_device.asked_of(device) if product.outputs * product.inputs >= LEAST_WEIGHTS]
    tables = matmul_device.tables_of(device)
    return wanted(asked, SHORT_LADDER, tables.shipped, tables.made)


def tune_missing(device: torch.device, budget_s: float) -> bool:
    """Measures what is missing, keeps it and has products take it. Returns whether there is something new. Nothing else
    should run on the device meanwhile: of nodes of one machine that start together one measures, the others find its
    table the next time."""
    key = stored.key_of(device)
    shipped = stored.tables_to_try(key.device, key.multiprocessors)
    plans_of = functools.partial(few_candidates, tables=shipped, multiprocessors=key.multiprocessors)
    with stored.measuring_alone() as is_alone:
        if not is_alone:
            logger.info("another node measures matrix products, or the user's cache can't be written")
            return False
        found = tune(missing(device), plans_of, DeviceMeasures(device), budget_s, time.monotonic)
        torch.cuda.empty_cache()
        path = stored.store_made(key, found.table) if found.times else None
    logger.info("measured %d matrix products, left %d for the next start: %s", len(found.times), found.left, path)
    matmul.read_tables_anew()
    return path is not None


def tune_products(
    device: torch.device,
    products: Iterable[Product],
    ladder: Iterable[int],
    budget_s: float,
    workers: int,
    on_measured: OnMeasured,
) -> Tuned:
    """Measures every plan worth it, whatever tables say, with kernels compiled by `workers` processes first."""
    ends_at = time.monotonic() + budget_s
    plans_of = functools.partial(candidates, multiprocessors=stored.key_of(device).multiprocessors)
    todo = wanted(products, ladder, {}, {})
    kernels = {kernel_of(plan, rows, product) for rows, product in todo for plan in plans_of(rows, product)}
    measures = DeviceMeasures(device)
    measures.leave_out(compile_all(kernels, workers, ends_at))
    return tune(todo, plans_of, measures, ends_at - time.monotonic(), time.monotonic, on_measured)


def compile_all(kernels: set[Kernel], workers: int, ends_at: float) -> set[Kernel]:
    """Compiles what time is left for. Returns those that can't be used."""
    ordered = sorted(kernels)
    broken = set()
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        results = pool.imap(compile_kernel, ordered)
        for kernel in ordered:
            try:
                why = results.next(max(0.0, ends_at - time.monotonic()))
            except multiprocessing.TimeoutError:
                break
            if why:
                logger.warning("left out %s: %s", kernel, why)
                broken.add(kernel)
    return broken
