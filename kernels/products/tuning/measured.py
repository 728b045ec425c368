"""Times of products on this device, by graphs of several products with weights that the cache doesn't hold."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch.nn import functional

from tandem.kernels.check.measure import median_event_seconds
from tandem.kernels.products import matmul
from tandem.kernels.products.fused_ops import silu_mul
from tandem.kernels.products.matmul_plans import GATE_UP_GROUP, Plan
from tandem.kernels.products.product_trials import TOLERANCE, random_matrix
from tandem.kernels.products.tuning.candidates import Kernel, Product, kernel_of

logger = logging.getLogger(__name__)

UNCACHED_BYTES = 256 << 20  # five times a Hopper's cache; a guess
REPLAYED = 8  # products of a graph at least, so that its launch counts little; a guess
REPEATS = 5  # a guess
SHARE_OF_MEMORY = 0.5  # of what is free, for weights; a guess


class DeviceMeasures:
    """Products in bf16 on the current device. Nothing else should run there meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of: Product | None = None
        self._weights: list[torch.Tensor] = []
        self._broken: set[Kernel] = set()

    def leave_out(self, kernels: set[Kernel]) -> None:
        """Has no plan measured that needs one of these."""
        self._broken |= kernels

    @torch.inference_mode()
    def seconds(self, rows: int, product: Product, plan: Plan | None) -> float | None:
        """Measures as `tuner.Measures` says."""
        kernel = None if plan is None else kernel_of(plan, rows, product)
        if kernel in self._broken:
            return None
        try:
            if self._of != product:
                self._weights, self._of = [], None
                self._weights, self._of = self._random_weights(product), product
            return self._time_of(rows, product, plan)
        except torch.OutOfMemoryError as error:
            logger.info("no memory to measure products of %s: %s", product, error)
        except Exception as failure:  # whatever a compiler or a kernel raises
            logger.info("%d rows of %s by %s: %s", rows, product, plan, failure)
            if kernel is not None:
                self._broken.add(kernel)
        return None

    def _random_weights(self, product: Product) -> list[torch.Tensor]:
        num_bytes = 2 * product.outputs * product.inputs
        number = max(1, -(-UNCACHED_BYTES // num_bytes))
        if number * num_bytes > SHARE_OF_MEMORY * torch.cuda.mem_get_info(self._device)[0]:
            raise torch.OutOfMemoryError(
                f"{number} weights of {num_bytes >> 20} MiB are more than half of what is free"
            )
        sizes = product.outputs, product.inputs
        return [torch.randn(sizes, dtype=torch.bfloat16, device=self._device).mul_(0.05) for _ in range(number)]

    def _time_of(self, rows: int, product: Product, plan: Plan | None) -> float | None:
        x = random_matrix(rows, product.inputs, torch.bfloat16, self._device, 99)
        run: Callable[[torch.Tensor], torch.Tensor] = functools.partial(by_torch, x, product.gated)
        if plan is not None:
            expected = run(self._weights[0])
            out = torch.full_like(expected, float("nan"))
            run = functools.partial(matmul.run_plan, plan, x, out_MN=out, silu=product.gated)
            if not relative_distance(run(self._weights[0]), expected) < TOLERANCE:
                logger.warning("wrong: %d rows of %s by %s", rows, product, plan)
                return None
        weights = self._weights * -(-REPLAYED // len(self._weights))
        return graph_seconds(lambda: [run(weight) for weight in weights], REPEATS) / len(weights)


def by_torch(x: torch.Tensor, gated: bool, weight: torch.Tensor) -> torch.Tensor:
    product = functional.linear(x, weight)
    return silu_mul(product, GATE_UP_GROUP) if gated else product


def relative_distance(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.float() - expected.float()).norm() / expected.float().norm()).item()


def graph_seconds(run: Callable[[], object], repeats: int) -> float:
    """Median time of a graph of `run`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return median_event_seconds(graph.replay, repeats, warm=1)


def compile_kernel(kernel: Kernel) -> str:
    """Runs one small product, so that the compiled kernel lies in Triton's cache; -> why it can't be used, or ''."""
    plan, gated, rows, outputs, inputs = kernel
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        x = random_matrix(rows, inputs, torch.bfloat16, device, 1)
        weight = random_matrix(outputs, inputs, torch.bfloat16, device, 2)
        error = relative_distance(matmul.run_plan(plan, x, weight, silu=gated), by_torch(x, gated, weight))
    except Exception as failure:  # whatever a compiler or a kernel raises
        return f"{type(failure).__name__}: {str(failure)[:120]}"
    return "" if error < TOLERANCE else f"error {error:.1e}"
