"""What options are called elsewhere: vLLM's names and SGLang's, and for `bench` those of their load generators.

An option of theirs is one of ours by another name, or it changes nothing here, which is said once, or it asks for what
isn't there, and is refused with the reason.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from tandem.engine.contracts.errors import ConfigError

# Ours by theirs; "not …": the opposite.
SAME: dict[str, str] = {
    "served_model_name": "served_name",
    "model_path": "model",
    "model_name": "model",
    "context_length": "max_model_len",
    "num_gpu_blocks_override": "num_blocks",
    "log_requests": "enable_log_requests",
    "max_log_len": "log_prompt_chars",
    "mem_fraction_static": "gpu_memory_utilization",
    "max_running_requests": "max_num_seqs",
    "long_prefill_token_threshold": "max_prefill_chunk",
    "chunked_prefill_size": "max_prefill_chunk",
    "disable_radix_cache": "not enable_prefix_caching",
    "disable_hybrid_kv_cache_manager": "not hybrid_kv",
    "disable_cascade_attn": "not share_prefixes",
    "disable_log_stats": "not log_stats",
    "enforce_eager": "not cuda_graphs",
    "disable_cuda_graph": "not cuda_graphs",
    "tp_size": "tensor_parallel_size",
    "api_server_count": "workers",
    "base_url": "url",
    "num_prompts": "num_requests",
    "request_rate": "rate",
    "max_concurrency": "concurrency",
    "random_input_len": "input_tokens",
    "random_output_len": "output_tokens",
    "sharegpt_output_len": "output_tokens",
    "random_prefix_len": "shared_prefix",
    "dataset_name": "dataset",
    "backend": "endpoint",
    "request_format": "endpoint",
    "target": "url",
    "max_requests": "num_requests",
    "max_duration": "max_seconds",
    "result_filename": "output",
    "output_path": "output",
}
SHORT: dict[str, str] = {"tensor_parallel_size": "-tp", "quantization": "-q", "pipeline_parallel_size": "-pp"} | {
    "data_parallel_size": "-dp",
    "compilation_config": "-O",
}


@dataclass(frozen=True)
class Foreign:
    """An option without a counterpart. `harmless`: its values that change nothing; None: every one of them."""

    why: str
    harmless: tuple[str, ...] | None = None
    takes_value: bool = True

    def heed(self, shown: str, value: Any) -> None:
        """Says that `shown`, as it was given, changes nothing. Raises ConfigError where it would."""
        is_off = not self.takes_value and str(value).lower() in ("false", "0")
        if self.harmless is not None and str(value).lower() not in self.harmless and not is_off:
            raise ConfigError(f"{shown} can't be had here: {self.why}")
        if self.harmless is None and not is_off:
            print(f"tandem: {shown} changes nothing here: {self.why}", file=sys.stderr)


def _flag(why: str) -> Foreign:
    return Foreign(why, takes_value=False)


def _refused(why: str, *harmless: str) -> Foreign:
    return Foreign(why, harmless)


def _refused_flag(why: str) -> Foreign:
    return Foreign(why, (), takes_value=False)


_OWN_TOKENIZER = "a model's tokenizer is the tokenizer.json in its folder"
WITHOUT_COUNTERPART: dict[str, Foreign] = {
    # change nothing
    "trust_remote_code": _flag("code that comes with a model is never run; a model that needs its own is refused"),
    "enable_chunked_prefill": _flag("prompts are always computed in chunks (--max-prefill-chunk)"),
    "enable_auto_tool_choice": _flag("tools may be called wherever the chat template knows of them"),
    "enable_prompt_tokens_details": _flag("`usage` always says how many prompt tokens were cached"),
    "async_scheduling": _flag("steps are always launched ahead"),
    "disable_log_requests": _flag("requests are logged with --enable-log-requests alone"),
    "enable_request_id_headers": _flag("X-Request-Id is always answered"),
    "enable_server_load_tracking": _flag("/metrics always has it"),
    "use_tqdm_on_load": _flag("progress is always shown"),
    "disable_uvicorn_access_log": _flag("requests are logged with --enable-log-requests alone"),
    "disable_frontend_multiprocessing": _flag("--workers says how many processes take requests"),
    "disable_custom_all_reduce": _flag("sums over GPUs are chosen for the machine"),
    "seed": Foreign("a request that sends no `seed` draws at random; one with a seed always draws the same"),
    "swap_space": Foreign("--host-tier-bytes says how much host memory KV may take"),
    "distributed_executor_backend": Foreign("the GPUs of a node are processes on one host"),
    "max_seq_len_to_capture": Foreign("graphs are captured for every length (--no-cuda-graphs: none)"),
    "max_parallel_loading_workers": Foreign("weights are read in parallel"),
    "uvicorn_log_level": Foreign("--log-level sets it for everything"),
    "prefix_caching_hash_algo": Foreign("blocks are always hashed by SHA-256"),
    "max_num_partial_prefills": Foreign("--contended-prefill-chunk says how prompts share a step"),
    "max_long_partial_prefills": Foreign("--contended-prefill-chunk says how prompts share a step"),
    "num_scheduler_steps": Foreign("steps are always launched ahead"),
    "preemption_mode": Foreign("what is preempted is computed again"),
    "cuda_graph_sizes": Foreign("graphs are captured for every size (--no-cuda-graphs: none)"),
    "max_cudagraph_capture_size": Foreign("graphs are captured for every size (--no-cuda-graphs: none)"),
    "guided_decoding_backend": Foreign("llguidance makes all masks"),
    "exclude_tools_when_tool_choice_none": _flag("tool_choice none always leaves the tools out of the prompt"),
    "enable_offline_docs": _flag("/docs always works offline"),
    "ignore_patterns": Foreign("of a hub's files only those that are read are fetched"),
    "safetensors_load_strategy": Foreign("weights are mapped and read in parallel"),
    "max_cpu_loras": Foreign("adapters are read again from their folders"),
    "mm_processor_cache_gb": Foreign("--media-cache-bytes says how much of what encoders made is kept"),
    "h11_max_header_count": Foreign("another parser reads HTTP, with limits of its own"),
    "h11_max_incomplete_event_size": Foreign("another parser reads HTTP, with limits of its own"),
    "structured_outputs_config": Foreign("llguidance makes all masks"),
    "show_hidden_metrics_for_version": Foreign("no metrics are hidden"),
    "worker_cls": Foreign("there is one kind of workers"),
    "compilation_config": Foreign("kernels and graphs are chosen for the machine; `tandem kernels` shows them"),
    # change nothing at these values, and are refused at others
    "tokenizer_mode": _refused(_OWN_TOKENIZER, "auto", "fast", "hf"),
    "pipeline_parallel_size": _refused("layers are not spread over GPUs; --tensor-parallel-size spreads each", "1"),
    "cpu_offload_gb": _refused("weights stay on the GPU; --host-tier-bytes takes KV to host memory", "0", "0.0"),
    "runner": _refused("what a model can do is read off it", "auto", "generate"),
    "task": _refused("what a model can do is read off it", "auto", "generate"),
    "max_logprobs": _refused("a request gets at most 20", "20"),
    "nnodes": _refused("start nodes where they are: tandem prefill, tandem decode, tandem router", "1"),
    "config_format": _refused("models are in Hugging Face's format", "auto", "hf"),
    "convert": _refused("what a model can do is read off it", "auto", "none"),
    "response_role": _refused("answers are the assistant's", "assistant"),
    "chat_template_content_format": _refused("it is read off the template", "auto"),
    "scheduling_policy": _refused(
        "requests may always say a `priority`; those alike go by --ttft-target-ms", "fcfs", "priority"
    ),
    "stream_interval": _refused("every token is an event as soon as it is there", "1"),
    "decode_context_parallel_size": _refused("a sequence's KV stays on one node", "1"),
    "prefill_context_parallel_size": _refused("a prompt is computed by one node", "1"),
    "data_parallel_size_local": _refused("all nodes of --data-parallel-size are on one host", "1"),
    "data_parallel_backend": _refused("nodes are processes of one host", "mp"),
    # refused
    "tokenizer": _refused(f"{_OWN_TOKENIZER}; put another one there"),
    "tokenizer_revision": _refused(_OWN_TOKENIZER),
    "hf_token": _refused("set HF_TOKEN in the environment, where other users don't see it"),
    "hf_overrides": _refused("change config.json in the model's folder"),
    "rope_scaling": _refused("change config.json in the model's folder"),
    "rope_theta": _refused("change config.json in the model's folder"),
    "download_dir": _refused("set HF_HOME in the environment"),
    "override_generation_config": _refused("write them into a folder's generation_config.json: --generation-config"),
    "code_revision": _refused("code that comes with a model is never run"),
    "kv_events_config": _refused("nodes publish their blocks in Redis: --redis-url"),
    "return_tokens_as_token_ids": _refused_flag("requests ask for ids: `return_token_ids`"),
    "disable_sliding_window": _refused_flag("set sliding_window to null in config.json"),
    "skip_tokenizer_init": _refused_flag("the router needs the tokenizer"),
    "headless": _refused_flag("tandem prefill, tandem decode and tandem unified start a node alone"),
    "enable_sleep_mode": _refused_flag("stop the node and start it again"),
    "logits_processors": _refused("requests have `logit_bias` and structured outputs"),
    "tool_parser_plugin": _refused("--tool-call-parser has those that there are"),
    "middleware": _refused("put a proxy in front"),
    "root_path": _refused("put a proxy in front that strips it"),
    "allowed_local_media_path": _refused("send a data: URL; no files of the server are read"),
    "kv_transfer_config": _refused("--prefill N --decode M start nodes that hand KV over; --transport says how"),
    "mm_processor_kwargs": _refused("set them in preprocessor_config.json, in the model's folder"),
    "uds": _refused("it listens on TCP: --host, --port"),
    "enable_prompt_embeds": _refused_flag("prompts are text or token ids"),
    "enable_mm_embeds": _refused_flag("images and sounds are sent as they are"),
    "enable_ssl_refresh": _refused_flag("certificates are read at the start"),
    "ssl_ciphers": _refused("ciphers are Python's own choice"),
    "enable_eplb": _refused_flag("experts stay on the GPU that loaded them"),
    "enable_force_include_usage": _refused_flag("clients ask for it: `stream_options.include_usage`"),
    "disable_fastapi_docs": _refused_flag("put a proxy in front that hides /docs"),
    "log_config_file": _refused("--log-level and --log-format say what is logged, and how"),
}
BENCH_WITHOUT_COUNTERPART: dict[str, Foreign] = {
    "ignore_eos": _flag("answers are always as long as was asked for"),
    "save_result": _flag("--output FILE saves the report"),
    "disable_tqdm": _flag("progress is drawn on terminals alone"),
    "trust_remote_code": _flag("no model is loaded"),
    "tokenizer": Foreign("the server counts tokens"),
    "percentile_metrics": Foreign("the report has them all"),
    "metric_percentiles": Foreign("the report has 50, 90 and 99"),
    "burstiness": _refused("arrivals are Poisson's", "1", "1.0"),
    "random_range_ratio": _refused("random prompts are of one length", "0", "0.0"),
    "rate_type": _refused("--concurrency N is a closed loop, --rate R an open one, --rate inf sends all at once"),
    "data": _refused("--input-tokens N --output-tokens M, or --dataset sharegpt --dataset-path FILE"),
    "goodput": _refused("only traces have targets: --trace FILE --ttft-target S --tpot-target S"),
}


def translate(name: str, value: Any) -> tuple[str, Any]:
    """Our name and value for an option as others call it; both as they are where it is no such name."""
    ours = SAME.get(name, name)
    if not ours.startswith("not "):
        return ours, value
    opposite = {"true": "false", "false": "true", "1": "0", "0": "1"}
    return ours.removeprefix("not "), opposite.get(str(value).lower(), value)
