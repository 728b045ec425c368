"""Which backend serves a layer: one table, in the order that measures fastest, and the fall to the next at run time.

A backend serves all of a layer, but may hand single operations on: those that only know prompts, and FlashInfer, leave
decode to our kernels, which are as fast and follow the lengths of a captured graph.
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from tandem.kernels.api.backend import AttentionBackend, kv_layer_shape
from tandem.kernels.api.errors import BackendUnavailableError
from tandem.kernels.api.spec import AttentionSpec

logger = logging.getLogger(__name__)

# Name -> module and class; the first that supports device, dtype, head size, options and block size serves the layer.
TABLE: tuple[tuple[str, str], ...] = (
    ("flash_attn", "FlashAttentionBackend"),
    ("flashinfer", "FlashInferBackend"),
    ("triton", "TritonBackend"),
    ("torch_flash", "TorchFlashBackend"),
    ("xformers", "XFormersBackend"),
    ("native", "NativeBackend"),
)
NAMES = tuple(name for name, _ in TABLE)
# Where our Hopper kernel computes prompts it is faster than FlashAttention 3 and FlashInfer (docs/measurements.md).
OURS_FIRST = ("triton", *(name for name in NAMES if name != "triton"))

_fallbacks: Counter[tuple[str, str]] = Counter()

# Errors after which a CUDA context is lost: no other kernel can run either, the node's epoch ends.
_STICKY = (
    "illegal memory access",
    "device-side assert",
    "misaligned address",
    "illegal instruction",
    "invalid address space",
    "invalid program counter",
    "hardware stack error",
    "unspecified launch failure",
    "launch timed out",
    "uncorrectable ecc",
)
# Failures of one launch that leave the context whole.
_LAUNCH_FAILURES = (
    "out of resource",
    "out of memory",
    "too many resources requested",
    "invalid configuration argument",
    "no kernel image",
    "no available kernel",
    "not implemented",
    "workspace",
    "alloc_failed",
    "cudnn_status",
    "cublas_status",
    "unsupported",
    "ptxas",
    "passmanager",
)


def load_backend(name: str) -> type[AttentionBackend]:
    """The backend class of that name (as in NAMES or as `get_name()` spells it). Raises BackendUnavailableError."""
    wanted = _ALIASES.get(name.lower(), name.lower())
    for module, class_name in TABLE:
        if module == wanted:
            backend: type[AttentionBackend] = getattr(
                importlib.import_module(f"tandem.kernels.backends.{module}"), class_name
            )
            return backend
    raise BackendUnavailableError(f"no attention backend is called {name!r}; choose auto or one of {', '.join(NAMES)}")


def order_for(device: torch.device, dtype: torch.dtype, options: AttentionSpec) -> tuple[str, ...]:
    """Names of all backends, fastest first on such a device."""
    if device.type == "cuda" and load_backend("triton").is_available():
        from tandem.kernels.backends.triton_prefill import why_general_layer

        if why_general_layer(device, dtype, options) is None:
            return OURS_FIRST
    return NAMES


def rank_backends(
    device: torch.device | str,
    dtype: torch.dtype,
    head_size: int,
    options: AttentionSpec,
    block_size: int | None = None,
) -> tuple[list[type[AttentionBackend]], dict[str, str]]:
    """(all backends that can serve the layer, best first; why each of the others can't). `block_size` None: no cache,
    or one whose blocks are still to be chosen."""
    device = torch.device(device)
    usable, reasons = [], {}
    for name in order_for(device, dtype, options):
        backend = load_backend(name)
        reason = _why_not(backend, device, dtype, head_size, options, block_size)
        if reason is None:
            usable.append(backend)
        else:
            reasons[name] = reason
    return usable, reasons


def select_backend(
    device: torch.device | str,
    dtype: torch.dtype,
    head_size: int,
    options: AttentionSpec,
    requested: str = "auto",
    block_size: int | None = None,
) -> tuple[type[AttentionBackend], str]:
    """(backend, why it was chosen). Raises BackendUnavailableError when the requested one can't serve the layer."""
    device = torch.device(device)
    if requested != "auto":
        backend = load_backend(requested)
        reason = _why_not(backend, device, dtype, head_size, options, block_size)
        if reason is not None:
            usable, _ = rank_backends(device, dtype, head_size, options, block_size)
            names = ", ".join(other.get_name().lower() for other in usable)
            raise BackendUnavailableError(f"attention backend {requested!r}: {reason}; usable here: {names}")
        return backend, "requested"
    usable, reasons = rank_backends(device, dtype, head_size, options, block_size)
    if not usable:
        raise BackendUnavailableError(f"no attention backend serves {dtype} on {device}: {reasons}")
    order = order_for(device, dtype, options)
    before = order[: next(index for index, name in enumerate(order) if load_backend(name) is usable[0])]
    skipped = "; ".join(f"{name}: {reasons[name]}" for name in before)
    return usable[0], f"first that fits ({skipped})" if skipped else "first in the table"


def run_with_fallback(
    backends: Sequence[type[AttentionBackend]], attempt: Callable[[type[AttentionBackend]], torch.Tensor]
) -> torch.Tensor:
    """Calls `attempt` with each backend until one works. Only launch and workspace failures of eager steps move on;
    everything else, and every sticky CUDA error, is raised. Each fall is logged and counted."""
    for index, backend in enumerate(backends):
        try:
            return attempt(backend)
        except Exception as error:
            if index + 1 == len(backends) or not is_launch_failure(error):
                raise
            following = backends[index + 1]
            count_fallback(backend.get_name(), following.get_name(), error)
    raise BackendUnavailableError("no attention backend was given")


def count_fallback(failed: str, following: str, error: BaseException) -> None:
    """Counts and logs that `following` does what `failed` was to do: backends, or whole ways to compute a step."""
    _fallbacks[failed, following] += 1
    logger.warning("%s failed (%s); %s serves this step", failed, error, following)


def fallback_counts() -> dict[tuple[str, str], int]:
    """(what failed, what took over) -> times, since the process started; for /metrics."""
    return dict(_fallbacks)


def is_launch_failure(error: BaseException) -> bool:
    """Whether another backend may serve the same step: a launch or workspace failure that left the device usable."""
    if is_sticky(error):
        return False
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False
    if isinstance(error, (torch.OutOfMemoryError, NotImplementedError)):
        return True
    if type(error).__module__.startswith("triton."):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _LAUNCH_FAILURES)


def is_sticky(error: BaseException) -> bool:
    """Whether the CUDA context is lost for good."""
    text = str(error).lower()
    return any(words in text for words in _STICKY)


_ALIASES = {"flash_attention": "flash_attn", "paged_attention": "native", "torch": "native"}


def _why_not(
    backend: type[AttentionBackend],
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    options: AttentionSpec,
    block_size: int | None,
) -> str | None:
    reason = backend.unavailable_reason() or backend.unsupported_reason(device, dtype, head_size, options)
    if options.sinks is not None and not backend.serves_sinks:
        reason = reason or "sinks"
    if options.attention_chunk is not None and not backend.serves_attention_chunks:
        reason = reason or "attention_chunk"
    if options.hides_first and not backend.serves_attention_chunks:
        reason = reason or "hides_first"
    if options.latent_size is not None and not backend.serves_latents:
        reason = reason or "latents in place of keys and values"
    if reason is not None or block_size is None:
        return reason
    if block_size % backend.block_multiple:
        return f"block_size {block_size}: needs a multiple of {backend.block_multiple}"
    sizes = 1, block_size, options.num_kv_heads, head_size
    asked, ours = backend.get_kv_cache_shape(*sizes, options.kv_cache_dtype), kv_layer_shape(*sizes)
    return None if asked == ours else f"keeps a block of KV as {list(asked)}, and pools have {list(ours)}"
