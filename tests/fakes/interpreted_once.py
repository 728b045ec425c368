"""Cheaper kernels under Triton's interpreter, which patches triton.language anew at each call of a device function.

That is half of what an interpreted kernel costs. In a process that does nothing but interpret, once is enough: when
this is imported.
"""

from __future__ import annotations

from types import SimpleNamespace

import triton.language as tl
from triton.runtime import interpreter

interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
KEPT = SimpleNamespace(restore=lambda: None)
interpreter._patch_lang = lambda fn: KEPT
