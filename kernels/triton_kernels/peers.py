"""What kernels do in the memory of other GPUs of the host: they write there, then raise a flag with a number."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import INTERPRETED


@triton.jit
def memory_of(addresses, rank, at, dtype: tl.constexpr):
    """What lies `at` bytes into a rank's mail. The compiler must know of the alignment to move 16 bytes at once."""
    return tl.multiple_of((tl.load(addresses + rank) + at).to(tl.pointer_type(dtype)), 16)


@triton.jit
def raise_flag(flag, number):
    """Tells a peer that what this program has written so far is there."""
    tl.debug_barrier()  # the one thread that writes the flag answers for all threads' writes before it
    tl.atomic_xchg(flag, number, sem="release", scope="sys")


@triton.jit
def send_row(mail, flags, slot, values, columns, mask, number, SIZE: tl.constexpr):
    """A row into slot `slot` of a peer's mail, then its number into the slot's flag."""
    tl.store(mail + slot * SIZE + columns, values, mask=mask)
    raise_flag(flags + slot, number)


@triton.jit
def read_flag(place):
    """A flag's number; what its writer wrote before it is there for the thread that reads it."""
    if INTERPRETED:
        return tl.load(place, volatile=True)
    else:
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def await_flag(place, number):
    while read_flag(place) != number:
        pass


@triton.jit
def await_row(mail, flags, slot, columns, mask, number, SIZE: tl.constexpr):
    """The row in slot `slot` of this rank's mail, fp32, once it is there."""
    await_flag(flags + slot, number)
    return tl.load(mail + slot * SIZE + columns, mask=mask, other=0.0, volatile=True).to(tl.float32)
