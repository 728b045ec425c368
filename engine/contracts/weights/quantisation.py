"""What config.json's quantization_config says of a checkpoint's linear layers, checked. No torch.

Formats, as their writers document them: `fp8` of transformers (per tensor or in blocks, as DeepSeek and Qwen publish),
`fbgemm_fp8`, compressed-tensors (float-quantized, pack-quantized), AWQ (gemm), GPTQ, and GPT-OSS's MXFP4. What isn't
computed exactly is refused by name. Scales of activations are passed over: whether activations are rounded is the
product's choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from tandem.engine.contracts.errors import ConfigError

Stored = Literal["made", "fp8", "packed", "awq", "gptq", "mxfp4"]
MERGED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "q_kv_a_proj": ("q_proj", "kv_a_proj_with_mqa"),
    "q_a_kv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
LANE_INPUTS = 32  # inputs that four lanes share in the kernels' layout of 4 bits (kernels/products/quantised_weight.py)
MADE: Literal["made"] = "made"  # quantised by us when a plain checkpoint is loaded
MXFP4: Literal["mxfp4"] = "mxfp4"  # e2m1 in groups that share a power of two: of experts alone
ELSE = (
    "use a checkpoint in bf16 (with --quantization fp8 it takes half the memory), fp8, AWQ, GPTQ or compressed-tensors"
)


class Quantisation(msgspec.Struct, frozen=True, kw_only=True):
    """How the linear layers of a decoder are quantised. `group`: inputs that share a scale, 0: all; `block`: outputs
    that share one in what is stored, 1: each has its own. `zero_offset`: what GPTQ's stored zero points lack."""

    stored: Stored
    bits: int = 8
    group: int = 0
    block: int = 1
    has_zeros: bool = False
    zero_offset: int = 0
    left_out: tuple[str, ...] = ()  # names of modules that are not quantised, or `re:` and an expression
    method: str = "fp8"  # as config.json calls it

    @property
    def has_plain_layers(self) -> bool:
        """Whether all but experts is stored as it is."""
        return self.stored == MXFP4

    @property
    def least_inputs(self) -> int:
        """What a rank's inputs of a layer must be a multiple of: no group is cut apart, nor what four lanes share."""
        return max(self.group, LANE_INPUTS if self.bits == 4 else 1)

    def leaves_out(self, module: str) -> bool:
        """Whether the linear layer of this name in the checkpoint is stored as it is. A name stands for all below it,
        and for every module whose own name it is, as transformers has it."""
        for name in self.left_out:
            if name.startswith("re:"):
                if re.match(name[3:], module):
                    return True
            elif name == module or module.startswith(f"{name}.") or f".{module}.".endswith(f".{name}."):
                return True
        return False

    def leaves_out_merged(self, module: str) -> bool:
        """Whether a linear layer of ours is stored as it is; of a merged one (a key of MERGED) its parts in the
        checkpoint are. Raises ConfigError when some parts are and others are not."""
        folder, _, own = module.rpartition(".")
        return self.leaves_out_all([f"{folder}.{part}" for part in MERGED.get(own, (own,))])

    def leaves_out_all(self, modules: Iterable[str]) -> bool:
        """Whether all these layers of the checkpoint, which are one layer to us, are stored as they are. Raises
        ConfigError when some are and others are not."""
        answers = {module: self.leaves_out(module) for module in modules}
        if len(set(answers.values())) > 1:
            listed = ", ".join(answers)
            raise ConfigError(f"some of {listed} are quantised, some not; that is not supported; {ELSE}")
        return any(answers.values())


def made_fp8() -> Quantisation:
    """What `--quantization fp8` makes of a plain checkpoint."""
    return Quantisation(stored=MADE)


def read_quantisation(raw: dict[str, Any]) -> Quantisation | None:
    """How a model's config.json says that its weights are quantised; None: they aren't. Raises ValueError that names
    what isn't supported."""
    given = raw.get("quantization_config")
    if given is None or given == {}:
        given = raw.get("compression_config")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ValueError(f"quantization_config is no object: {given!r}")
    method = given.get("quant_method", "compressed-tensors" if "config_groups" in given else None)
    readers = {
        "fp8": _fp8,
        "fbgemm_fp8": _fbgemm,
        "compressed-tensors": _compressed_tensors,
        "awq": _awq,
        "gptq": _gptq,
        MXFP4: _mxfp4,
    }
    if method not in readers:
        raise ValueError(f"quantised weights of quant_method {method!r} are not supported; {ELSE}")
    found = readers[method](given)
    return msgspec.structs.replace(found, method=method)


def _fp8(given: dict[str, Any]) -> Quantisation:
    if given.get("modules_to_convert") or given.get("expert_dtype", "fp8") != "fp8":
        raise _refused("fp8", "modules_to_convert" if given.get("modules_to_convert") else "expert_dtype", given)
    left_out = _names(given.get("modules_to_not_convert") or given.get("ignored_layers"))
    size = given.get("weight_block_size")
    if size is None:
        return Quantisation(stored="fp8", block=0, left_out=left_out)
    if not (isinstance(size, list) and len(size) == 2 and all(isinstance(one, int) and one > 0 for one in size)):
        raise _refused("fp8", "weight_block_size", given)
    return Quantisation(stored="fp8", block=size[0], group=size[1], left_out=left_out)


def _fbgemm(given: dict[str, Any]) -> Quantisation:
    return Quantisation(stored="fp8", left_out=_names(given.get("modules_to_not_convert")))


def _awq(given: dict[str, Any]) -> Quantisation:
    if given.get("bits", given.get("w_bit")) != 4:
        raise _refused("awq", "bits", given)
    if str(given.get("version", "gemm")).lower() != "gemm":
        raise _refused("awq", "version", given)
    group = given.get("group_size", given.get("q_group_size", 128))
    left_out = _names(given.get("modules_to_not_convert"))
    return Quantisation(stored="awq", bits=4, group=_group("awq", group), has_zeros=True, left_out=left_out)


def _gptq(given: dict[str, Any]) -> Quantisation:
    if given.get("bits") != 4:
        raise _refused("gptq", "bits", given)
    for field in ("desc_act", "dynamic", "lm_head", "modules_in_block_to_quantize"):
        if given.get(field):
            raise _refused("gptq", field, given)
    offset = 0 if given.get("checkpoint_format") == "gptq_v2" else 1
    group = _group("gptq", given.get("group_size", 128))
    return Quantisation(stored="gptq", bits=4, group=group, has_zeros=True, zero_offset=offset)


def _mxfp4(given: dict[str, Any]) -> Quantisation:
    """Every writer leaves out all but the experts, whatever it lists."""
    return Quantisation(stored=MXFP4, bits=4, group=LANE_INPUTS)


def _compressed_tensors(given: dict[str, Any]) -> Quantisation:
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise _refused("compressed-tensors", "config_groups", given)
    scheme = next(iter(groups.values()))
    weights = scheme.get("weights") or {}
    if scheme.get("targets") != ["Linear"] or scheme.get("output_activations"):
        raise _refused("compressed-tensors", "targets", scheme)
    left_out = _names(given.get("ignore"))
    kind, bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    if (kind, bits) == ("float", 8):
        if strategy == "block":
            rows, columns = weights["block_structure"]
            return Quantisation(stored="fp8", block=rows, group=columns, left_out=left_out)
        if strategy in ("tensor", "channel"):
            return Quantisation(stored="fp8", block=0 if strategy == "tensor" else 1, left_out=left_out)
    elif (kind, bits, given.get("format", scheme.get("format"))) == ("int", 4, "pack-quantized"):
        if weights.get("actorder") not in (None, False, "weight", "static"):
            raise _refused("compressed-tensors", "actorder", weights)
        if strategy in ("group", "channel"):
            group = _group("compressed-tensors", weights.get("group_size") if strategy == "group" else -1)
            zeros = not weights.get("symmetric", True)
            return Quantisation(stored="packed", bits=4, group=group, has_zeros=zeros, left_out=left_out)
    raise ValueError(
        f"quantised weights of compressed-tensors with {bits} bits, type {kind}, strategy {strategy} and format "
        f"{given.get('format')} are not supported; {ELSE}"
    )


def _group(method: str, size: Any) -> int:
    """The number of inputs that share a scale; 0 for all, which formats write as -1. Raises ValueError for sizes that
    cut apart the 32 inputs that four lanes of the kernels share."""
    if size == -1:
        return 0
    if not isinstance(size, int) or size < 1 or size % LANE_INPUTS:
        raise ValueError(f"{method} with group_size {size!r} is not supported: a multiple of 32, or -1; {ELSE}")
    return size


def _names(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise ValueError(f"quantization_config must list names of modules, not {given!r}")
    return tuple(given)


def _refused(method: str, field: str, given: dict[str, Any]) -> ValueError:
    return ValueError(f"quantised weights of {method} with {field} {given.get(field)!r} are not supported; {ELSE}")
