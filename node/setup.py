"""From options to a loaded model and a sized KV pool: what every role does before it serves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from tandem.engine.adapters.node_adapters import NodeAdapters, TakesAdapters
from tandem.engine.blocks.window import NO_WINDOW, BlockWindow
from tandem.engine.contracts.config import LoraOptions, NodeOptions
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.kv_layout import KVGroup, KVLayout, ModelIdentity, places_of_layers
from tandem.engine.contracts.model_folder import resolve_model, served_name
from tandem.engine.contracts.model_shape import ModelShape
from tandem.engine.contracts.wire.parts import SPAN_MULTIPLE
from tandem.engine.device.kv_encoding import choose_kv_encoding
from tandem.engine.device.kv_pool import free_host_bytes, make_layout, num_blocks_for
from tandem.engine.models.choice import dtype_of_weights, load_chosen, load_config
from tandem.engine.models.identity import model_identity
from tandem.engine.parallel.group import Membership, TensorParallel
from tandem.engine.precision.kv_scales import scales_of_random_prompts
from tandem.engine.running.at_start.memory import profile_free_bytes
from tandem.engine.running.runner_needs import Model
from tandem.engine.scheduling.speculation.options import DraftModelOptions, PromptLookup, read_speculative_config
from tandem.node.drafting.engine import LoadedDraft, load_draft
from tandem.node.drafting.heads import LoadedHead, load_head, reads_mtp
from tandem.node.precise.another_cache import OverAnotherCache
from tandem.node.ranks.expert_groups import check_expert_group, join_expert_group

logger = logging.getLogger(__name__)

# The longest step with prompt work on a decode node to which no other bound and no target was given.
DECODE_ITL_MAX_MS = 6.0  # docs/measurements.md#the-gap-of-a-hand-off


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, and the properties on which peers must agree."""

    config: ModelShape
    model: Model
    device: torch.device
    dtype: torch.dtype
    layout: KVLayout
    identity: ModelIdentity
    max_model_len: int
    served_name: str
    folder: Path
    replays_graphs: bool  # whether decode steps run as CUDA graphs
    adapters: NodeAdapters | None = None  # where requests may take some
    draft: LoadedDraft | LoadedHead | None = None  # where it guesses what the model will say


def choose_device(options: NodeOptions) -> torch.device:
    """The device to serve on. Raises ConfigError when CUDA is asked for and there is none."""
    if options.device == "cpu" or (options.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda, but torch sees no CUDA device: install a CUDA build of torch or use cpu")
    if options.device_index >= torch.cuda.device_count():
        raise ConfigError(f"--device-index {options.device_index}, but there are {torch.cuda.device_count()} devices")
    device = torch.device("cuda", options.device_index)
    torch.cuda.set_device(device)
    return device


def with_device_defaults(options: NodeOptions, device: torch.device) -> NodeOptions:
    """The same options with a choice for each budget of steps that was left to the node (0)."""
    given, on_gpu, decodes = options.scheduler, device.type == "cuda", options.role == "decode"
    prompt_budget = 256 if decodes else 0
    itl_max_ms = given.itl_max_ms
    if decodes and measures_steps(options, device) and not given.tpot_target_ms:
        itl_max_ms = itl_max_ms or DECODE_ITL_MAX_MS
    if itl_max_ms or given.tpot_target_ms:
        prompt_budget = 0  # steps are bounded by their time instead
    scheduler = replace(
        given,
        max_num_seqs=given.max_num_seqs or (256 if on_gpu else 64),
        max_num_batched_tokens=given.max_num_batched_tokens or (8192 if on_gpu else 2048),
        contended_prefill_chunk=given.contended_prefill_chunk or (2048 if has_deadlines(options) else 0),
        itl_max_ms=itl_max_ms,
        decode_prompt_budget=given.decode_prompt_budget or prompt_budget,
    )
    return replace(options, scheduler=scheduler)


def has_deadlines(options: NodeOptions) -> bool:
    """Whether prompts go by deadlines on such a node."""
    return options.role == "prefill" or options.scheduler.tpot_target_ms > 0


def measures_steps(options: NodeOptions, device: torch.device) -> bool:
    """Whether this node measures at its start how long steps with prompt work take."""
    return options.role != "prefill" and device.type == "cuda"


def load(
    options: NodeOptions,
    membership: Membership | None = None,
    on_loaded: Callable[[float], None] | None = None,
) -> LoadedModel:
    """The model that `options` name, on its device; with a membership this rank's share of it, after all ranks have
    met. The folder is checked first, so that a bad one fails before anything slow happens. `on_loaded` is told how much
    of the weights is there, of 1. Raises ConfigError."""
    folder = resolve_model(options.model.model, options.model.revision)
    config = load_config(folder, options.model)
    _check_options(options, config, has_ranks=membership is not None)
    check_expert_group(options, config)
    max_model_len, cache = options.model.max_model_len or config.max_model_len, options.cache
    device = choose_device(options)
    num_ranks = 1 if membership is None else membership.shard.size
    torch.set_num_threads(options.num_threads or max(1, torch.get_num_threads() // num_ranks))
    name: str = options.model.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else dtype_of_weights(folder, config, options.model)
    dtype: torch.dtype = getattr(torch, name)
    kept = choose_kv_encoding(cache, dtype, device, config.num_layers)
    shard = None if membership is None else membership.shard
    layout = make_layout(config, cache.block_size, kept.dtype, shard, kept.scales)
    most = _most_rows(options, device)
    group = None if membership is None else TensorParallel.join(membership, device, most, config.hidden_size, dtype)
    experts = join_expert_group(options, device, most)
    parts = folder, config, options.model, device, dtype, options.attention_backend
    model = load_chosen(*parts, group, on_loaded, experts, reads_mtp(options))
    if cache.calculate_kv_scales:
        layout = _with_measured_scales(layout, model, config, options, max_model_len, device, dtype)
    identity = model_identity(folder, config, cache.hash_block_size, name, options.model.load_format)
    head = load_head(options, model, folder, max_model_len, layout, identity)
    if head is not None:
        layout, identity = head.layout, head.identity
    layout = _with_windows(layout, model, options)  # its layer has a place, too
    if kept.dtype != dtype:
        _keep_kv_as(model, layout.group)
    adapters = _make_adapters(model, options.lora, dtype, device)
    draft: LoadedDraft | LoadedHead | None = head
    if head is None and (shard is None or shard.rank == 0):
        draft = load_draft(options, folder, config, max_model_len, device, dtype)
    if options.compile:
        model.compile_forward()
    served = served_name(options.model.model, options.model.served_name)
    replays = options.cuda_graphs and device.type == "cuda" and _can_be_captured(model, device, dtype, cache.block_size)
    return LoadedModel(
        config, model, device, dtype, layout, identity, max_model_len, served, folder, replays, adapters, draft
    )


def _check_options(options: NodeOptions, config: ModelShape, has_ranks: bool) -> None:
    """Raises ConfigError for options that contradict each other, or that the model can't be served with."""
    cache, architecture = options.cache, config.architecture
    if options.leaning and options.role != "unified":
        raise ConfigError("--leaning is for nodes that do all work: leave it out, or start `tandem unified`")
    if options.leaning and not has_deadlines(options):
        logger.warning("--leaning does nothing without --tpot-target-ms (docs/leanings.md)")
    speculates = read_speculative_config(options.scheduler.speculative_config) is not None
    if options.model.max_model_len > config.max_model_len:
        raise ConfigError(f"--max-model-len {options.model.max_model_len} is beyond the model's {config.max_model_len}")
    if options.model.max_model_len == 1:
        raise ConfigError("--max-model-len 1 has no room for an output: a prompt and its output take at least 2 tokens")
    if cache.block_size < 1 or cache.hash_block_size < 1 or cache.block_size % cache.hash_block_size:
        sizes = f"--block-size {cache.block_size} is no multiple of --hash-block-size {cache.hash_block_size}"
        raise ConfigError(f"{sizes}; change one of them")
    if config.encoder is None:
        return
    if SPAN_MULTIPLE % cache.block_size:
        raise ConfigError(f"--block-size {cache.block_size}: with an encoder it must divide {SPAN_MULTIPLE}")
    if speculates:
        raise ConfigError(f"--speculative-config: {architecture} has an encoder: leave it out")
    if has_ranks:
        raise ConfigError(f"--tensor-parallel-size: {architecture} has an encoder, and runs on one GPU")


def _most_rows(options: NodeOptions, device: torch.device) -> int:
    """The most rows that a step may have."""
    scheduler = with_device_defaults(options, device).scheduler
    return max(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)


def _make_adapters(
    model: TakesAdapters, options: LoraOptions, dtype: torch.dtype, device: torch.device
) -> NodeAdapters | None:
    if not options.enable_lora:
        return None
    try:
        adapters = NodeAdapters(model.adapter_sites(), options, dtype, device)
    except torch.OutOfMemoryError:
        sizes = f"{options.max_loras} adapters of rank {options.max_lora_rank}"
        raise ConfigError(f"there is no memory for {sizes}: lower --max-loras or --max-lora-rank") from None
    model.take_adapters(adapters.stacks)
    return adapters


def _with_measured_scales(
    layout: KVLayout,
    model: Model,
    config: ModelShape,
    options: NodeOptions,
    max_model_len: int,
    device: torch.device,
    dtype: torch.dtype,
) -> KVLayout:
    """`layout` with scales measured here and now. Peers convert between unlike scales, as between unlike dtypes."""
    if model.group is not None or model.encoder is not None:
        raise ConfigError("--calculate-kv-scales: not with --tensor-parallel-size or an encoder; use --kv-scales")
    exact = make_layout(config, options.cache.block_size, dtype)
    scheduler = with_device_defaults(options, device).scheduler
    scales = scales_of_random_prompts(OverAnotherCache(model), exact, scheduler, max_model_len, device)
    group = msgspec.structs.replace(layout.group, k_scales=scales.k, v_scales=scales.v)
    return msgspec.structs.replace(layout, groups=(group,))


def _keep_kv_as(model: Model, group: KVGroup) -> None:
    """Tells the layers the dtype and scales of the pool that will be bound. To be called before the first step."""
    for layers in (model.attention_layers, model.cross_layers):
        for index, attention in enumerate(layers.values()):
            k_scale, v_scale = (scales[index] if scales else 1.0 for scales in (group.k_scales, group.v_scales))
            attention.keep_kv_as(group.dtype, k_scale, v_scale)


def _can_be_captured(model: Model, device: torch.device, dtype: torch.dtype, block_size: int) -> bool:
    """Whether each layer's attention may be part of a CUDA graph; warns when one's may not."""
    for name, layer in (*model.attention_layers.items(), *model.cross_layers.items()):
        if not layer.can_be_captured(device, dtype, block_size):
            logger.warning("decode steps run without CUDA graphs, several times slower: no kernel serves %s", name)
            return False
    return True


def size_pool(loaded: LoadedModel, options: NodeOptions, taken_bytes: int = 0) -> int:
    """Number of blocks: as configured, else what memory allows after the worst step, `taken_bytes` less. Raises
    ConfigError."""
    if options.cache.num_blocks or options.cache.kv_cache_memory_bytes:
        free = 0
    elif loaded.device.type == "cuda":
        free = profile_free_bytes(
            loaded.model,
            loaded.layout,
            options.scheduler,
            loaded.max_model_len,
            loaded.device,
            options.cache.gpu_memory_utilization,
            loaded.replays_graphs,
            loaded.adapters,
            options.prompt_graph_tokens,
            options.prompt_graph_attention,
        )
        if loaded.model.media_encoder is not None:
            free -= options.cache.media_cache_bytes
        if loaded.draft is not None and loaded.replays_graphs and options.role != "prefill":
            free -= loaded.draft.graph_bytes(options.scheduler, loaded.device)
    else:
        free = free_host_bytes(most=1 << 30)
    twin_bytes = 0 if loaded.draft is None else loaded.draft.twin_bytes
    num_blocks = num_blocks_for(options.cache, loaded.layout, max(0, free - taken_bytes), twin_bytes)
    return num_blocks if loaded.model.group is None else loaded.model.group.smallest(num_blocks)


def block_window(loaded: LoadedModel, options: NodeOptions) -> BlockWindow:
    """What sequences of this node may give back. Where all layers slide, a draft model or head sees further back in the
    same blocks; where others see everything, it has what it reads in the blocks of those."""
    group = loaded.layout.group
    if group.window is None or (not group.num_windows and _sees_further(options)):
        return NO_WINDOW
    return BlockWindow(group.window, options.cache.block_size, group.num_windows)


def _sees_further(options: NodeOptions) -> bool:
    """Whether something beside the model reads more than its windows; the same on all ranks."""
    asked = read_speculative_config(options.scheduler.speculative_config)
    looks_back = asked is not None and not isinstance(asked, PromptLookup)
    return looks_back and not (isinstance(asked, DraftModelOptions) and options.role == "prefill")


def _with_windows(layout: KVLayout, model: Model, options: NodeOptions) -> KVLayout:
    """`layout` with the widest window of the model's layers, if all slide, or if those that do have window blocks. A
    head that the model has taken is one more layer that sees everything."""
    specs = [layer.spec for layer in model.attention_layers.values()]
    windows = [spec.sliding_window or spec.attention_chunk for spec in specs]  # a chunk begins no further back
    known = [window for window in windows if window is not None]
    if not known or model.cross_layers:
        return layout
    group = layout.group
    apart = options.cache.hybrid_kv and not (group.k_scales or options.cache.precise_kv_tokens)
    places = places_of_layers(windows, int(model.guess_head is not None)) if apart else ()
    if places:
        num_layers = 1 + max(place.layer for place in places)
        group = msgspec.structs.replace(group, num_layers=num_layers, places=places, window=max(known))
    elif len(known) == len(windows):
        group = msgspec.structs.replace(group, window=max(known))
    return msgspec.structs.replace(layout, groups=(group,))


def with_length_that_fits(loaded: LoadedModel, options: NodeOptions, num_blocks: int) -> LoadedModel:
    """The same model, with a length of which one sequence fits into a pool of `num_blocks`.

    Warns when the model's own length does not; raises ConfigError when the configured one does not.
    """
    num_places = num_blocks // loaded.layout.group.blocks_each
    fits, wanted = num_places * options.cache.block_size, loaded.max_model_len
    if wanted <= fits:
        return loaded
    pool = f"the KV pool of {num_blocks} blocks of {options.cache.block_size} tokens holds {fits}"
    remedy = "--num-blocks, --kv-cache-memory-bytes or --gpu-memory-utilization give it more"
    if options.model.max_model_len:
        raise ConfigError(f"--max-model-len is {wanted}, but {pool}: lower it to {fits} or less, or {remedy}")
    logger.warning("the model takes %d tokens, but %s: max_model_len is %d; %s", wanted, pool, fits, remedy)
    return replace(loaded, max_model_len=fits)
