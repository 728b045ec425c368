"""One line of help for each configuration field; a test holds the list against engine/config.py."""

from __future__ import annotations

OPTION_HELP: dict[str, str] = {
    # ModelOptions
    "model": "folder in Hugging Face format, or a hub name; left out: the demo model that ships with tandem",
    "served_name": "name by which clients call the model; default: the last part of the folder's or hub name",
    "load_format": "dummy makes up weights from config.json alone, for benchmarks",
    "dtype": "type of weights and KV; auto: the checkpoint's on a GPU, float32 on a CPU",
    "max_model_len": "longest prompt plus output, in tokens; 0: the model's own limit",
    "revision": "hub revision to load; empty: the default branch",
    # CacheOptions
    "block_size": "tokens of a KV block; a multiple of --hash-block-size",
    "hash_block_size": "tokens of a block hash; equal in the whole cluster",
    "num_blocks": "KV blocks of the pool; 0: sized by --kv-cache-memory-bytes or by free memory",
    "kv_cache_memory_bytes": "size of the KV pool; 0: sized by free memory",
    "gpu_memory_utilization": "share of the GPU's memory that a node may take, weights included",
    "enable_prefix_caching": "reuse the KV of prompts that begin alike",
    # SchedulerOptions
    "max_num_seqs": "sequences that run at the same time on a node",
    "max_num_batched_tokens": "tokens of one step, decodes and prompt chunks together",
    "max_prefill_chunk": "longest prompt chunk of one step; 0: 2048 on a prefill node, else --max-num-batched-tokens",
    "contended_prefill_chunk": "prompt tokens of a step while several prompts wait; 0: 1024 on a prefill node",
    "ttft_target_ms": "prefill nodes: prompts that can have their first token in this time go first; 0: by arrival",
    "max_queue": "requests that wait (on a node, or at the router) before more are refused",
    "decode_prompt_budget": "prompt tokens of a step while others decode; 0: by --itl-budget-ms on a decode node's GPU",
    "itl_budget_ms": "decode nodes: a step with prompt work takes at most this long; measured at start",
    "parked_kv_fraction": "prefill nodes: share of the pool for finished KV that has no destination yet",
    "growth_headroom": "decode nodes: share of the pool kept free for the growth of running requests",
    # Timeouts
    "heartbeat_s": "seconds between heartbeats of connected processes",
    "peer_lost_s": "silence after which a process counts as lost",
    "connect_s": "longest wait for a connection's handshake",
    "grant_lease_s": "how long a prefill node may take to fill the blocks it was granted",
    "resend_s": "an unanswered control message is sent again after this",
    "request_s": "deadline of a request",
    "drain_s": "longest time that running requests get to finish after SIGTERM",
    "quarantine_warn_s": "blocks that stay in quarantine longer are logged",
    # NodeOptions
    "node_id": "name of this node, unique in the cluster; default: its role and a random suffix",
    "host": "address to listen on",
    "port": "port to listen on; 0: any free one",
    "device": "auto: the GPU where there is one",
    "device_index": "which of the visible GPUs",
    "tensor_parallel_size": "GPUs of one node, from --device-index on; each holds a share of the weights and KV heads",
    "attention_backend": "auto, or the name of one backend",
    "transport": "how KV travels between nodes: auto, local, shm, cuda_ipc, nixl, ucx or tcp",
    "redis_url": "Redis of the cluster, redis://host:port/db; `serve` starts its own where it needs one and has none",
    "namespace": "name of the cluster; clusters of different names can share a Redis",
    "cluster_secret_file": "file with the cluster's secret; needed wherever a node listens beyond loopback",
    "ready_fd": "file descriptor that gets one line of JSON when the process serves",
    "launcher_address": "ZMQ address that gets this process's heartbeats",
    "num_threads": "CPU threads of torch in one node; 0: torch's default, shared out among local nodes",
    "fault_injection": "tests only: faults to inject into KV transfers",
    "cuda_graphs": "replay captured graphs for decode steps",
    "digests": "check KV digests before a hand-off is committed",
    # RouterOptions
    "workers": "router processes that share the port; 0: one for four cores, at most 8",
    "nodes": "control address of a node, repeatable; default: discovered through Redis",
    "max_attempts": "attempts for a request whose nodes fail",
    "max_body_bytes": "largest request body",
    "stream_queue": "undelivered events of one stream after which its client counts as stuck",
    "local_tail_tokens": "an uncached prompt tail up to this many tokens is computed on the decode node itself",
    "api_keys_file": "file with one accepted API key a line; empty: no authentication",
    # of the launcher alone
    "prefill": "number of prefill nodes; with --decode: a local cluster instead of a single node",
    "decode": "number of decode nodes; with --prefill: a local cluster instead of a single node",
}
