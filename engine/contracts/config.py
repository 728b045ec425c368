"""Frozen configuration, one dataclass a component, built once from command line, environment and YAML.

Precedence: command line, then environment (`TANDEM_<FIELD>`), then the YAML file, then the default here. Unknown
keys are errors that name the key; nothing mutates a config after it was built. A field's annotation says all that users
are told of it: its bounds, which hold for what they give (classes that are built by code are not checked), and its
help. What would do nothing without another option of the class is refused by its `__post_init__`. Default numbers are
guesses, unless one names a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from tandem.engine.contracts.errors import ConfigError

MOST_DRAFTS = 16  # tokens guessed ahead of one sequence; a guess: more are hardly ever right together
Device = Literal["auto", "cpu", "cuda"]
PlacementName = Literal["round_robin", "least_loaded", "power_of_two", "prefix_aware", "elastic"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "plain", "color", "json"]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]  # 0 often stands for "chosen for you"
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Bytes = Annotated[int, Meta(ge=0, le=2**60)]
Port = Annotated[int, Meta(ge=0, le=65535), "port to listen on; 0: any free one"]
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=1e7)]
PositiveSeconds = Annotated[float, Meta(gt=0, le=1e7)]
# Options that several kinds of processes take.
Host = Annotated[str, "address to listen on"]
RedisUrl = Annotated[
    str, "redis://host:port/db, a cluster or sentinels (docs/directory.md); `serve` starts one where needed"
]
Namespace = Annotated[str, "name of the cluster; clusters of different names can share a Redis"]
SecretFile = Annotated[str, "file with the cluster's secret; needed wherever a node listens beyond loopback"]
LeastLogged = Annotated[LogLevel, "the least that is logged; libraries log from warnings on"]
HowLogged = Annotated[LogFormat, "auto: short and coloured on a terminal, else plain; json: an object a line"]
ReadyFd = Annotated[int, Meta(ge=-1), "file descriptor for what engine/process/launcher_pipe.py tells a launcher"]
MaxQueue = Annotated[Count, "requests that wait (on a node, or at the router) before more are refused"]


@dataclass(frozen=True)
class ModelOptions:
    """What is served. `model` is a local folder or a hub name; `served_name` what clients call it."""

    model: Annotated[str, "folder in Hugging Face format, or a hub name; left out: a demo model that ships with Tandem"]
    served_name: Annotated[
        str, "name by which clients call the model, or several between commas; default: the last part of MODEL"
    ] = ""
    load_format: Annotated[LoadFormat, "dummy makes up weights from config.json alone, for benchmarks"] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        "type of weights and KV; auto: the checkpoint's on a GPU, float32 on a CPU",
    ] = "auto"
    max_model_len: Annotated[Count, "longest prompt plus output, in tokens; 0: the model's own limit"] = 0
    quantization: Annotated[
        Literal["auto", "fp8", "awq", "gptq", "compressed-tensors", "mxfp4"],
        "how weights are quantised; auto: as the checkpoint says. fp8 makes them so while a checkpoint of 16 bits is "
        "loaded (docs/quantised_weights.md)",
    ] = "auto"
    revision: Annotated[str, "hub revision to load; empty: the default branch"] = ""
    model_impl: Annotated[
        Literal["auto", "tandem", "transformers"],
        "whose modules compute; auto: ours where we have the architecture, else transformers' (docs/hf_models.md)",
    ] = "auto"


@dataclass(frozen=True)
class CacheOptions:
    """The KV pool of a node, its tiers in host memory and on disk, and the formats in which they keep KV."""

    block_size: Annotated[Positive, "tokens of a KV block; a multiple of --hash-block-size"] = 64
    hash_block_size: Annotated[Positive, "tokens of a block hash; equal in the whole cluster"] = 64
    num_blocks: Annotated[Count, "KV blocks of the pool; 0: sized by --kv-cache-memory-bytes or by free memory"] = 0
    kv_cache_memory_bytes: Annotated[Bytes, "size of the KV pool; 0: sized by free memory"] = 0
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0, le=1), "share of the GPU's memory that a node may take, weights included"
    ] = 0.90
    enable_prefix_caching: Annotated[bool, "reuse the KV of prompts that begin alike"] = True
    host_tier_bytes: Annotated[
        int,
        Meta(ge=-1, le=2**60),
        "host memory for KV that the pool has no room for; -1: up to 16 GiB, on a CPU 256 MiB; 0: none",
    ] = -1
    host_tier_dtype: Annotated[
        Literal["auto", "fp8_e4m3"],
        "as what the tiers keep KV; fp8_e4m3: in half of the bytes, restored to 3 bits of mantissa",
    ] = "auto"
    hybrid_kv: Annotated[
        bool, "where some layers slide and others see everything: keep theirs apart, and give back what slid out"
    ] = True
    keep_kv_once: Annotated[
        bool, "keep no copy in host memory, and rather none in the pool, of what a node of this host surely keeps"
    ] = False
    disk_tier_bytes: Annotated[Bytes, "disk space for KV that host memory has no room for; 0: none"] = 0
    disk_tier_dir: Annotated[str, "folder of the disk tier; kept when the node ends, several nodes may share it"] = ""
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "fp8_e4m3"],
        "what this node keeps KV as; auto: as --dtype. Nodes may differ: KV is converted on the way",
    ] = "auto"
    media_cache_bytes: Annotated[
        Bytes, "memory for what was encoded of images and sounds, so that no node encodes one twice"
    ] = 256 << 20  # a guess
    calculate_kv_scales: Annotated[
        bool, "measure the scales of a cache of fp8 at the start, on random prompts (docs/kernels.md)"
    ] = False
    precise_kv_tokens: Annotated[
        Count,
        "tokens of 16-bit KV beside a cache of fp8: requests that overflow fp8 are served there; 0: values that "
        "overflow saturate and are counted (docs/layouts.md)",
    ] = 0
    kv_quality_sample_rate: Annotated[
        Share,
        "share of the steps of which a row is computed again without the cache, to show its error in /metrics; 0: none",
    ] = 0.0
    kv_scales: Annotated[str, 'JSON file of fp8 scales, one a layer: {"k": [...], "v": [...]}; left out: 1.0'] = ""


@dataclass(frozen=True)
class SchedulerOptions:
    """What bounds the steps of a node, and which prompts go first."""

    max_num_seqs: Annotated[Count, "sequences that run at the same time on a node; 0: 256 on a GPU, 64 on a CPU"] = 0
    max_num_batched_tokens: Annotated[
        Count, "tokens of one step, decodes and prompt chunks together; 0: 8192 on a GPU, 2048 on a CPU"
    ] = 0
    max_prefill_chunk: Annotated[Count, "longest prompt chunk of one step; 0: --max-num-batched-tokens"] = 0
    contended_prefill_chunk: Annotated[Count, "longest chunk while several prompts wait; 0: 2048 on a prefill node"] = 0
    ttft_target_ms: Annotated[
        Count,
        "prompts that can have their first token in this time go first, on prefill nodes and where --tpot-target-ms is "
        "set; 0: by arrival",
    ] = 300
    tpot_target_ms: Annotated[
        float,
        Meta(ge=0, le=1e6),
        "time a token, on average since a stream's first: steps have as much prompt work as streams have time for; "
        "0: none, --itl-max-ms bounds them",
    ] = 0.0
    share_prefixes: Annotated[
        bool, "decode rows with the same leading blocks read those once a group where that pays (GPU)"
    ] = True
    max_queue: MaxQueue = 4096
    decode_prompt_budget: Annotated[
        Count,
        "most prompt tokens of a step while others decode; 0: by --itl-max-ms and --tpot-target-ms on a GPU, without "
        "them 256 on a decode node, and on a single one 2048 or what takes 50 ms, whichever is more, as far as graphs "
        "of prompts reach",
    ] = 0
    itl_max_ms: Annotated[
        float,
        Meta(ge=0, le=1e6),
        "a step with prompt work beside decodes takes at most this long; 0: 6 on a decode node without "
        "--tpot-target-ms, else without bound",
    ] = 0.0
    parked_kv_fraction: Annotated[
        Share, "share of the pool for KV that has no destination yet; nodes that do all work: a quarter at most"
    ] = 0.25
    speculative_config: Annotated[
        str,
        'guess tokens ahead, as {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, '
        '"prompt_lookup_min": 2}: by what followed the newest ones before; or {"method": "draft_model", "model": ..., '
        '"num_speculative_tokens": 4}: by a smaller model of the same vocabulary; or by an EAGLE-3 head of the model, '
        'method "eagle3", or the layer that guesses in its own checkpoint, {"method": "mtp", '
        '"num_speculative_tokens": 1} (docs/speculation.md); empty: off',
    ] = ""
    growth_headroom: Annotated[
        float, Meta(ge=0, lt=1), "decode nodes: share of the pool kept free for the growth of running requests"
    ] = 0.1


@dataclass(frozen=True)
class LoraOptions:
    """Adapters of low rank beside the model's weights (docs/lora.md)."""

    enable_lora: Annotated[bool, "serve LoRA adapters, by names that clients give as `model` (docs/lora.md)"] = False
    max_loras: Annotated[int, Meta(ge=1, le=1024), "adapters in one batch of a node; each has a slot on the device"] = 8
    max_lora_rank: Annotated[int, Meta(ge=1, le=512), "highest rank of an adapter; slots are made for it"] = 16
    lora_host_bytes: Annotated[Bytes, "host memory for adapters that have no slot; those in use don't count"] = 4 << 30
    lora_modules: Annotated[
        tuple[str, ...], "NAME=FOLDER of an adapter in PEFT's format, as nodes see it, repeatable"
    ] = ()


@dataclass(frozen=True)
class Timeouts:
    """Durations in seconds."""

    heartbeat_s: Annotated[PositiveSeconds, "seconds between heartbeats of connected processes"] = 0.5
    peer_lost_s: Annotated[PositiveSeconds, "silence after which a process counts as lost"] = 5.0
    connect_s: Annotated[PositiveSeconds, "longest wait for a connection's handshake"] = 10.0
    grant_lease_s: Annotated[PositiveSeconds, "how long a prefill node may take to fill blocks it was granted"] = 60.0
    resend_s: Annotated[PositiveSeconds, "an unanswered control message is sent again after this"] = 0.5
    request_s: Annotated[PositiveSeconds, "deadline of a request"] = 600.0
    drain_s: Annotated[Seconds, "longest time that running requests get to finish after SIGTERM"] = 60.0
    quarantine_warn_s: Annotated[PositiveSeconds, "blocks that stay in quarantine longer are logged"] = 10.0
    migrate_s: Annotated[Seconds, "seconds that handing a running sequence to another node may take"] = 10.0
    load_adapter_s: Annotated[PositiveSeconds, "how long nodes may take to read an adapter"] = 60.0
    pull_s: Annotated[Seconds, "how long a request waits at least for a prefix from a peer, not to compute it"] = 0.5


@dataclass(frozen=True)
class NodeOptions:
    """One prefill, decode or unified node."""

    role: Literal["prefill", "decode", "unified"]
    model: ModelOptions
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    timeouts: Timeouts = field(default_factory=Timeouts)
    lora: LoraOptions = field(default_factory=LoraOptions)
    leaning: Annotated[
        Literal["", "prefill", "decode"],
        "of a node that does all work: what it is for first, until demand asks for the other (docs/elastic.md)",
    ] = ""
    node_id: Annotated[str, "name of this node, unique in the cluster; default: its role and a random suffix"] = ""
    host: Host = "127.0.0.1"
    port: Port = 0
    advertise_host: Annotated[
        str,
        "host by which others reach this node, on the ports on which it listens (where it listens on all interfaces, "
        "or behind a relay); default: --host",
    ] = ""
    device: Annotated[Device, "auto: the GPU where there is one"] = "auto"
    device_index: Annotated[Count, "which of the visible GPUs"] = 0
    tensor_parallel_size: Annotated[Positive, "GPUs of one node; each holds a share of the weights and KV heads"] = 1
    enable_expert_parallel: Annotated[
        bool, "each GPU of a node holds whole experts of a mixture instead of a share of every expert"
    ] = False
    data_parallel_size: Annotated[
        Positive,
        "nodes in place of one, each with a GPU and requests of its own; with --enable-expert-parallel they share out "
        "the experts (docs/expert_groups.md)",
    ] = 1
    data_parallel_rank: Annotated[Count, "this node's place among those that share out experts, from 0"] = 0
    data_parallel_rpc_port: Annotated[Port, "port of this host where such nodes meet; 0: `serve` chooses one"] = 0
    attention_backend: Annotated[str, "auto: the best that this machine has; or the name of one"] = "auto"
    compile: Annotated[bool, "have torch.compile make what a model computes between its layers' attention"] = False
    cuda_graphs: Annotated[bool, "replay captured graphs for decode steps"] = True
    prompt_graph_tokens: Annotated[
        Count, "steps with up to so many tokens of prompts replay graphs from one attention to the next; 0: none do"
    ] = 2048  # a guess: the device needs over 46 ms for more (docs/measurements.md#prompts-as-graphs)
    prompt_graph_attention: Annotated[
        bool, "these graphs hold attention of 16 bits, too (Hopper), which else is launched between them"
    ] = True
    tune_products_s: Annotated[
        float,
        Meta(ge=0, le=3600),
        "how long a start may measure matrix products that no table has (docs/product_tables.md); 0: not at all",
    ] = 30.0  # a guess
    transport: Annotated[str, "how KV travels between nodes: auto, local, shm, cuda_ipc, nixl, ucx or tcp"] = "auto"
    redis_url: RedisUrl = ""
    namespace: Namespace = "tandem"
    cluster_secret_file: SecretFile = ""
    log_level: LeastLogged = "info"
    log_format: HowLogged = "auto"
    ready_fd: ReadyFd = -1
    num_threads: Annotated[Count, "CPU threads of torch in a node; 0: torch's default, shared by local nodes"] = 0
    fault_injection: Annotated[str, "tests only: faults to inject into KV transfers"] = ""
    digests: Annotated[bool, "check KV digests before a hand-off is committed"] = True
    handoff_trace: Annotated[str, "debugging only: folder for the times of each hand-off's stages, a file a node"] = ""


@dataclass(frozen=True)
class WebOptions:
    """Browsers, TLS, compression: what a router does around its answers."""

    allowed_origins: Annotated[tuple[str, ...], "web page's origin that may ask (CORS), repeatable; *: any"] = ()
    allowed_methods: Annotated[tuple[str, ...], "method that pages of --allowed-origins may use; default: any"] = ("*",)
    allowed_headers: Annotated[tuple[str, ...], "header that such pages may send; default: any"] = ("*",)
    allow_credentials: Annotated[bool, "such pages may send cookies and certificates, too"] = False
    ssl_certfile: Annotated[str, "certificate (PEM) of HTTPS; empty: plain HTTP"] = ""
    ssl_keyfile: Annotated[str, "its private key (PEM), if that isn't in the same file"] = ""
    ssl_ca_certs: Annotated[str, "certificates (PEM) that sign those of clients"] = ""
    ssl_cert_reqs: Annotated[int, Meta(ge=0, le=2), "0: clients need no certificate; 1: checked if any; 2: needed"] = 0
    gzip_min_bytes: Annotated[
        Count, "whole answers from this size on are compressed for clients that take gzip; 0: never. Streams never are"
    ] = 0

    def __post_init__(self) -> None:
        of_pages = self.allow_credentials, self.allowed_methods != ("*",), self.allowed_headers != ("*",)
        if any(of_pages) and not self.allowed_origins:
            raise ConfigError(
                "--allow-credentials, --allowed-methods and --allowed-headers are for pages of --allowed-origins: "
                "name these, too"
            )


@dataclass(frozen=True)
class MediaOptions:
    """What a router takes of images and sounds (docs/multimodal.md)."""

    limit_mm_per_prompt: Annotated[
        str, 'most images and sounds of one prompt, as {"image": 4, "audio": 1} or image=4,audio=1; empty: 16 of each'
    ] = ""
    allowed_media_domains: Annotated[
        tuple[str, ...], "host whose images and sounds are fetched, repeatable; none: data: URLs alone"
    ] = ()
    media_max_pixels: Annotated[Positive, "largest image, in pixels"] = 1 << 25  # a guess
    media_max_audio_s: Annotated[PositiveSeconds, "longest sound, in seconds"] = 600.0  # a guess
    media_fetch_s: Annotated[PositiveSeconds, "seconds that fetching one image or sound may take"] = 10.0  # a guess


@dataclass(frozen=True)
class RouterOptions:
    """One router (several worker processes share the port)."""

    model: ModelOptions
    host: Host = "127.0.0.1"
    port: Port = 8000
    workers: Annotated[
        int, Meta(ge=0, le=1024), "router processes that share the port; 0: one for four cores, at most 8"
    ] = 0
    nodes: Annotated[tuple[str, ...], "control address of a node, repeatable; default: discovered through Redis"] = ()
    redis_url: RedisUrl = ""
    namespace: Namespace = "tandem"
    cluster_secret_file: SecretFile = ""
    timeouts: Timeouts = field(default_factory=Timeouts)
    web: WebOptions = field(default_factory=WebOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    media: MediaOptions = field(default_factory=MediaOptions)
    max_attempts: Annotated[Positive, "attempts for a request whose nodes fail"] = 3
    max_body_bytes: Annotated[int, Meta(ge=1, le=2**60), "largest request body"] = 8 << 20
    max_queue: MaxQueue = 1024
    node_wait_s: Annotated[
        Seconds, "how long requests wait while no node is there that could take them, before 503; 0: --connect-s"
    ] = 0.0
    # ZMQ's sockets suffice for 5,000 nodes.
    max_nodes: Annotated[
        Positive, "nodes that one router process connects to; others wait until one of them leaves"
    ] = 2048
    max_connections: Annotated[
        Count, "clients connected to one router process; 0: what its descriptors allow beside those for nodes"
    ] = 0
    http_header_s: Annotated[PositiveSeconds, "how long a client may take until its request's head is whole"] = 20.0
    http_body_s: Annotated[PositiveSeconds, "how long it may then take until the body is whole"] = 60.0
    http_keep_alive_s: Annotated[PositiveSeconds, "how long a connection may be idle between two requests"] = 75.0
    stream_queue: Annotated[Positive, "undelivered events of one stream after which its client counts as stuck"] = 1024
    placement: Annotated[PlacementName, "how nodes are chosen for requests (docs/placement.md)"] = "prefix_aware"
    placement_header: Annotated[bool, "answers say in X-Tandem-Placement which nodes had them, and why"] = True
    rebalance_kv: Annotated[
        Share, "move running sequences to a decode node whose KV pool is less full by this share of it (0: off)"
    ] = 0.0
    prefill_nodes_per_prompt: Annotated[
        int, Meta(ge=1, le=16), "nodes of one host that may compute a long prompt together (docs/pipelined_prompts.md)"
    ] = 1
    prefill_shared_tokens: Annotated[
        Positive, "uncached tokens from which a prompt is long enough for two nodes; for each more half as many"
    ] = 4096  # a guess: shorter tails are computed sooner than nodes have agreed on them
    local_tail_tokens: Annotated[
        Count, "uncached prompt tails of up to so many tokens are the decode node's where it is done sooner"
    ] = 256
    api_keys_file: Annotated[
        str,
        "file with one API key a line, or YAML with tenants, scopes, limits (docs/keys.md); empty: none is asked for",
    ] = ""
    generation_config: Annotated[
        str, "sampling defaults of requests: the model's own (auto), OpenAI's (none) or those of a folder"
    ] = "auto"
    strict_requests: Annotated[
        bool, "refuse bodies with unknown fields, which else are left out and named in the log"
    ] = False
    enable_log_requests: Annotated[
        bool, "log a line for each request that has ended: ids, the key's name, lengths, times, nodes; no text"
    ] = False
    log_prompt_chars: Annotated[
        Count, "so many first characters of each prompt in those lines, for whoever reads the log; 0: none"
    ] = 0
    otlp_traces_endpoint: Annotated[
        str, "URL of a collector that gets a trace of each request by OTLP over HTTP (docs/tracing.md); empty: none"
    ] = ""
    enable_tokenizer_info_endpoint: Annotated[
        bool, "serve /tokenizer_info: special tokens and chat template, for lm-eval's remote tokenizer"
    ] = False
    api_key: Annotated[
        str, "the only API key; better as TANDEM_API_KEY, since command lines are for every local user to see"
    ] = field(default="", repr=False)
    chat_template: Annotated[
        str, "Jinja template of conversations: a file, or the template itself; left out: the model's own"
    ] = ""
    tool_call_parser: Annotated[
        str,
        "how the model writes calls of tools: hermes, mistral, deepseek_v3, openai, llama3_json, none; auto: as its "
        "chat template does",
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        "how the model marks its reasoning: qwen3, deepseek_r1, openai_gptoss, none; auto: as its chat template does",
    ] = "auto"
    log_level: LeastLogged = "info"
    log_format: HowLogged = "auto"
    ready_fd: ReadyFd = -1

    def __post_init__(self) -> None:
        if self.log_prompt_chars and not self.enable_log_requests:
            raise ConfigError("--log-prompt-chars adds to the lines of --enable-log-requests: give that, too")
