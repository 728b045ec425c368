"""Frozen configuration, one dataclass a component, built once from command line, environment and YAML.

Precedence: command line, then environment (`TANDEM_<FIELD>`), then the YAML file, then the default here. Unknown
keys are errors that name the key; nothing mutates a config after it was built. The bounds below hold for what users
give; classes that are built by code are not checked. Default numbers are guesses, unless one names a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

Device = Literal["auto", "cpu", "cuda"]
PlacementName = Literal["round_robin", "least_loaded", "power_of_two", "prefix_aware"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
LogLevel = Literal["debug", "info", "warning", "error"]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]  # 0 often stands for "chosen for you"
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Bytes = Annotated[int, Meta(ge=0, le=2**60)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=1e7)]
PositiveSeconds = Annotated[float, Meta(gt=0, le=1e7)]


@dataclass(frozen=True)
class ModelOptions:
    """What is served. `model` is a local folder or a hub name; `served_name` what clients call it."""

    model: str
    served_name: str = ""  # "": the folder's or hub name's last part
    load_format: LoadFormat = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: the checkpoint's on GPU, float32 on CPU
    max_model_len: Count = 0  # 0: the model's own
    revision: str = ""


@dataclass(frozen=True)
class CacheOptions:
    block_size: Positive = 64  # tokens; a multiple of hash_block_size
    hash_block_size: Positive = 64  # tokens; equal in the whole cluster
    num_blocks: Count = 0  # 0: from kv_cache_memory_bytes, or from free memory
    kv_cache_memory_bytes: Bytes = 0
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.90
    enable_prefix_caching: bool = True
    # What the pool has no room for goes there (docs/tiers.md). -1: up to 16 GiB a GPU node, 256 MiB a CPU node; 0: none
    host_tier_bytes: Annotated[int, Meta(ge=-1, le=2**60)] = -1
    host_tier_dtype: Literal["auto", "fp8_e4m3"] = "auto"  # fp8_e4m3: half of the bytes, and of the precision
    disk_tier_bytes: Bytes = 0  # 0: none; needs a host tier and disk_tier_dir
    disk_tier_dir: str = ""
    # auto: the dtype that is computed in. May differ between nodes: KV is converted when it is handed over.
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8_e4m3"] = "auto"
    kv_scales: str = ""  # fp8: a JSON file of each layer's scales (engine/device/kv_encoding.py); "": 1.0


@dataclass(frozen=True)
class SchedulerOptions:
    max_num_seqs: Count = 0  # 0: 256 on a GPU, 64 on a CPU
    max_num_batched_tokens: Count = 0  # tokens a step, decodes and prompt chunks together; 0: 8192 or 2048
    max_prefill_chunk: Count = 0  # 0: only bounded by the budget
    contended_prefill_chunk: Count = 0  # prompt tokens of a step while several prompts wait; 0: 2048 on a prefill node
    # Prefill nodes: prompts that can have their first token this long after they came go first, in order of deadline.
    ttft_target_ms: Count = 300
    share_prefixes: bool = True  # decode rows with the same leading blocks read them once, where that pays
    max_queue: Count = 4096  # requests waiting on a node before it refuses more
    # Prompt tokens mixed into a step while others decode; 0: on a decode node with a GPU what fits `itl_budget_ms`,
    # else 256 on a decode node (short tails, recompute) and 2048 on a single one.
    decode_prompt_budget: Count = 0
    # How long a step with prompt work may take on a decode node: docs/measurements.md#the-gap-of-a-hand-off.
    itl_budget_ms: Annotated[float, Meta(gt=0, le=1e6)] = 6.0
    # Prefill nodes: share of the pool that finished KV without a grant may fill before prompts wait for a grant.
    parked_kv_fraction: Share = 0.25
    # Decode nodes: share of the pool kept free for growth of running requests when granting.
    growth_headroom: Annotated[float, Meta(ge=0, lt=1)] = 0.1


@dataclass(frozen=True)
class Timeouts:
    """Durations in seconds."""

    heartbeat_s: PositiveSeconds = 0.5
    peer_lost_s: PositiveSeconds = 5.0  # silence after which a peer counts as lost
    connect_s: PositiveSeconds = 10.0
    grant_lease_s: PositiveSeconds = 60.0
    resend_s: PositiveSeconds = 0.5  # an unanswered verb is sent again after this
    request_s: PositiveSeconds = 600.0
    drain_s: Seconds = 60.0
    quarantine_warn_s: PositiveSeconds = 10.0
    migrate_s: Seconds = 10.0  # how long handing a running sequence to another node may take
    pull_s: Seconds = 0.5  # how long a request waits at least for a prefix from a peer before it is computed


@dataclass(frozen=True)
class NodeOptions:
    """One prefill, decode or unified node."""

    role: Literal["prefill", "decode", "unified"]
    model: ModelOptions
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    timeouts: Timeouts = field(default_factory=Timeouts)
    node_id: str = ""  # "": role and a random suffix
    host: str = "127.0.0.1"
    port: Port = 0  # 0: any free port
    advertise_host: str = ""  # by which peers and routers reach this node, if that is not `host`
    device: Device = "auto"
    device_index: Count = 0
    tensor_parallel_size: Positive = 1  # GPUs of this node, from device_index on
    attention_backend: str = "auto"
    cuda_graphs: bool = True  # decode steps replay captured graphs; off: every step runs kernel by kernel
    transport: str = "auto"  # or a name out of kv_connector/transports/selection.py
    redis_url: str = ""  # "": no Redis (single node, or routers given --node)
    namespace: str = "tandem"
    cluster_secret_file: str = ""
    log_level: LogLevel = "info"
    ready_fd: Annotated[int, Meta(ge=-1)] = -1  # a file descriptor for what engine/process/launcher_pipe.py says
    num_threads: Count = 0  # torch CPU threads; 0: torch's default
    fault_injection: str = ""  # tests only, see kv_connector/transports/faults.py
    digests: bool = True
    handoff_trace: str = ""  # a folder for the times of each hand-off's stages, see kv_connector/transfer/trace.py


@dataclass(frozen=True)
class RouterOptions:
    """One router (several worker processes share the port)."""

    model: ModelOptions  # for the tokenizer and for sampling defaults
    host: str = "127.0.0.1"
    port: Port = 8000
    workers: Annotated[int, Meta(ge=0, le=1024)] = 0  # 0: one for four cores, at most 8
    nodes: tuple[str, ...] = ()  # control addresses; empty: discover through Redis
    redis_url: str = ""
    namespace: str = "tandem"
    cluster_secret_file: str = ""
    timeouts: Timeouts = field(default_factory=Timeouts)
    max_attempts: Positive = 3
    max_body_bytes: Annotated[int, Meta(ge=1, le=2**60)] = 8 << 20
    max_queue: Count = 1024  # requests without a node before 429
    max_nodes: Positive = 2048  # connections of one process to nodes; a guess, ZMQ's sockets suffice for 5,000
    max_connections: Count = 0  # of clients to one process; 0: what its descriptors allow beside those for nodes
    http_header_s: PositiveSeconds = 20.0  # from a connection, or a request's first byte, until its head is whole
    http_body_s: PositiveSeconds = 60.0  # from then until its body is
    http_keep_alive_s: PositiveSeconds = 75.0  # until the next request of a connection
    stream_queue: Positive = 1024  # undelivered events of one stream before its client counts as stuck
    placement: PlacementName = "prefix_aware"
    # Running sequences go from a decode node to one whose KV pool is less full by this share of it; 0: never.
    rebalance_kv: Share = 0.0
    local_tail_tokens: Count = 256  # an uncached tail up to this may be computed on the decode node itself
    api_keys_file: str = ""
    # Whose generation_config.json says how to sample where a request doesn't: auto (the model's), none, or a folder.
    generation_config: str = "auto"
    api_key: str = field(default="", repr=False)  # the only key, in place of a file
    chat_template: str = ""  # a file or the template itself, in place of the model's own
    tool_call_parser: str = "auto"  # a name of router/chat/parsers.py, auto or none
    reasoning_parser: str = "auto"
    log_level: LogLevel = "info"
    ready_fd: Annotated[int, Meta(ge=-1)] = -1
