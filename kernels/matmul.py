"""Matrix products of decode steps: y = x @ weight^T for 1 to 320 rows, by our Hopper kernel where it beats cuBLAS.

M rows, N outputs, K inputs, G = 2 * intermediate size of a gated MLP. Which kernel runs is one pure function
(`choose_plan`) of the sizes over a table measured on the device and shipped in `tuned/`; whatever the table doesn't
name is torch's. Products are deterministic: parts of a sum are added in a fixed order.

Products launched one after another overlap: a kernel fetches weights before its predecessor has ended. So no kernel
may write a weight on the stream just before its use, except one that itself doesn't let successors start early
(torch's kernels and copies don't).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from tandem.kernels.fused_ops import silu_mul

GATE_UP_GROUP = 8  # rows of gate, then rows of up; the kernel's epilogue depends on it
LONGEST_TUNED = 320  # rows
MAX_PROGRAMS = 264
WORKSPACE_FLOATS = 2 * 132 * 128 * 256
MAX_TILES = 16384


class Plan(NamedTuple):
    """How the Hopper kernel cuts one product."""

    tile_n: int
    tile_m: int
    tile_k: int
    stages: int
    warps: int
    programs: int  # for each tile along M

    def lanes(self, num_rows: int) -> int:
        return -(-num_rows // self.tile_m)

    def grid(self, num_rows: int, num_outputs: int, num_inputs: int) -> int:
        units = -(-num_outputs // self.tile_n) * -(-num_inputs // self.tile_k)
        return self.lanes(num_rows) * min(self.programs, units)

    def is_valid(self, num_rows: int, num_outputs: int, num_inputs: int) -> bool:
        """Whether the workspace holds every program's two unfinished tiles, and all index arithmetic fits 32 bits."""
        grid, lanes = self.grid(num_rows, num_outputs, num_inputs), self.lanes(num_rows)
        tiles = -(-num_outputs // self.tile_n)
        units = tiles * -(-num_inputs // self.tile_k)
        fits = 2 * grid * self.tile_n * self.tile_m <= WORKSPACE_FLOATS and tiles * lanes <= MAX_TILES
        return fits and grid <= MAX_PROGRAMS and units * (grid // lanes + 1) < 2**31


Table = Mapping[tuple[int, int], tuple[tuple[int, Plan | None], ...]]


class MatmulWorkspace:
    """Unfinished sums and arrival counters of the products of one stream; the counters return to zero by themselves."""

    def __init__(self, device: torch.device) -> None:
        self.partials = torch.empty(WORKSPACE_FLOATS, dtype=torch.float32, device=device)
        self.counters = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)

    def check_integrity(self) -> None:
        """Waits for the device; between products every counter is zero."""
        assert not bool(self.counters.any()), "a product left its arrival counters behind"


def parse_table(text: str) -> Table:
    """From JSON {"products": {"N,K": [[rows, plan or null], ...]}}: rows rising, a plan lists Plan's fields."""
    products = json.loads(text)["products"]
    table: dict[tuple[int, int], tuple[tuple[int, Plan | None], ...]] = {}
    for sizes, steps in products.items():
        num_outputs, num_inputs = (int(size) for size in sizes.split(","))
        table[num_outputs, num_inputs] = tuple((rows, Plan(*plan) if plan else None) for rows, plan in steps)
    return table


def choose_plan(table: Table, num_rows: int, num_outputs: int, num_inputs: int) -> Plan | None:
    """The plan of the next larger number of rows measured for this weight; None: torch."""
    for rows, plan in table.get((num_outputs, num_inputs), ()):
        if num_rows <= rows:
            valid = plan is not None and num_rows > 0 and plan.is_valid(num_rows, num_outputs, num_inputs)
            return plan if valid else None
    return None


def linear(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    out_MN: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight^T + bias, summed in fp32, as torch.nn.functional.linear. Allocates `out_MN` alone, when not given."""
    plan = _plan(x_MK, weight_NK)
    if plan is None or not _is_aligned(x_MK, weight_NK, out_MN):
        return _into(out_MN, functional.linear(x_MK, weight_NK, bias_N))
    return _stream(plan, x_MK, weight_NK, bias_N, None, out_MN, silu=False)


def linear_add(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    addend_MN: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    out_MN: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight^T + bias + addend, rounded once where our kernel runs. `out_MN` may be `addend_MN` itself."""
    plan = _plan(x_MK, weight_NK)
    if plan is None or not _is_aligned(x_MK, weight_NK, out_MN) or not _is_aligned_matrix(addend_MN):
        return _into(out_MN, functional.linear(x_MK, weight_NK, bias_N).add_(addend_MN))
    return _stream(plan, x_MK, weight_NK, bias_N, addend_MN, out_MN, silu=False)


def linear_silu_mul(x_MK: torch.Tensor, grouped_GK: torch.Tensor, out_MI: torch.Tensor | None = None) -> torch.Tensor:
    """silu(x @ gate^T) * (x @ up^T) -> [M, G / 2], for weights laid out by `group_gate_up`."""
    plan = _plan(x_MK, grouped_GK)
    if plan is None or not _is_aligned(x_MK, grouped_GK, out_MI) or grouped_GK.shape[0] % 16:
        return _into(out_MI, silu_mul(functional.linear(x_MK, grouped_GK), GATE_UP_GROUP))
    return _stream(plan, x_MK, grouped_GK, None, None, out_MI, silu=True)


def group_gate_up(gate_up_GK: torch.Tensor) -> torch.Tensor:
    """[gate; up] stacked along rows -> rows in groups: 8 of gate, the same 8 of up, the next 8 of gate, ...

    A new tensor; works for biases [G] too. Raises ValueError unless the intermediate size is a multiple of 8."""
    half, odd = divmod(gate_up_GK.shape[0], 2)
    if odd or half % GATE_UP_GROUP:
        raise ValueError(f"{gate_up_GK.shape[0]} rows of gate and up: need a multiple of {2 * GATE_UP_GROUP}")
    halves = gate_up_GK.view(2, half // GATE_UP_GROUP, GATE_UP_GROUP, *gate_up_GK.shape[1:])
    return halves.transpose(0, 1).reshape(gate_up_GK.shape)


def ungroup_gate_up(grouped_GK: torch.Tensor) -> torch.Tensor:
    """Undoes `group_gate_up`."""
    groups = grouped_GK.view(-1, 2, GATE_UP_GROUP, *grouped_GK.shape[1:])
    return groups.transpose(0, 1).reshape(grouped_GK.shape)


def prepare(device: torch.device | str) -> None:
    """Makes the device's workspace and reads its table: once, before graphs are captured."""
    device = torch.device(device)
    if device.type == "cuda" and table_of(device):
        _workspace(device)


@functools.cache
def table_of(device: torch.device) -> Table:
    """The table tuned for this device; empty where none was or the kernel can't run."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0) or not _can_stream():
        return {}
    properties = torch.cuda.get_device_properties(device)
    file = Path(__file__).parent / "tuned" / f"matmul_{properties.name.replace(' ', '_')}.json"
    if properties.multi_processor_count != 132 or not file.is_file():
        return {}
    return parse_table(file.read_text())


def run_plan(
    plan: Plan, x_MK: torch.Tensor, weight_NK: torch.Tensor, out_MN: torch.Tensor | None = None, *, silu: bool = False
) -> torch.Tensor:
    """The product by a given plan, whatever the table says: for tuning and tests. Needs a Hopper GPU."""
    return _stream(plan, x_MK, weight_NK, None, None, out_MN, silu=silu)


@functools.cache
def _can_stream() -> bool:
    try:
        from tandem.kernels.triton_kernels import matmul_stream  # noqa: F401
    except ImportError:
        return False
    return True


@functools.lru_cache(maxsize=4096)
def _cached_plan(rows: int, outputs: int, inputs: int, device: torch.device) -> Plan | None:
    return choose_plan(table_of(device), rows, outputs, inputs)


def _plan(x_MK: torch.Tensor, weight_NK: torch.Tensor) -> Plan | None:
    if not x_MK.is_cuda or x_MK.dim() != 2 or x_MK.shape[0] > LONGEST_TUNED:
        return None
    if x_MK.dtype not in (torch.bfloat16, torch.float16) or weight_NK.dtype != x_MK.dtype:
        return None
    return _cached_plan(x_MK.shape[0], weight_NK.shape[0], weight_NK.shape[1], x_MK.device)


def _is_aligned_matrix(matrix: torch.Tensor) -> bool:
    """What the tensor memory accelerator can address: contiguous rows that start at multiples of 16 bytes."""
    return matrix.stride(1) == 1 and matrix.stride(0) % 8 == 0 and matrix.data_ptr() % 16 == 0


def _is_aligned(x_MK: torch.Tensor, weight_NK: torch.Tensor, out: torch.Tensor | None) -> bool:
    aligned = _is_aligned_matrix(x_MK) and _is_aligned_matrix(weight_NK) and weight_NK.shape[0] % 8 == 0
    return aligned and (out is None or _is_aligned_matrix(out))


def _into(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    return result if out is None else out.copy_(result)


@functools.cache
def _workspace(device: torch.device) -> MatmulWorkspace:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the first product of a device is being captured: call kernels.matmul.prepare(device) first")
    return MatmulWorkspace(device)


def _stream(
    plan: Plan,
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    addend_MN: torch.Tensor | None,
    out: torch.Tensor | None,
    *,
    silu: bool,
) -> torch.Tensor:
    from tandem.kernels.triton_kernels.matmul_launch import launch

    num_rows, num_outputs = x_MK.shape[0], weight_NK.shape[0] // (2 if silu else 1)
    if out is None:
        out = torch.empty((num_rows, num_outputs), dtype=x_MK.dtype, device=x_MK.device)
    workspace = _workspace(x_MK.device)
    tensors: dict[str, Any] = {"bias_N": bias_N, "addend_MN": addend_MN, "silu": silu}
    launch(plan, x_MK, weight_NK, out, workspace.partials, workspace.counters, **tensors)
    return out
