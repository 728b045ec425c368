"""Options of the commands that measure and explain: `bench`, `explain`, `kernels`. Their help is beside the bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

URL = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class BenchOptions:
    url: Annotated[str, Meta(description="server to measure")] = URL
    model: Annotated[str, Meta(description="model name to ask for; default: the first that the server lists")] = ""
    num_requests: Annotated[int, Meta(ge=1, description="requests in all")] = 100
    concurrency: Annotated[int, Meta(ge=1, description="closed loop: in flight")] = 8
    rate: Annotated[float, Meta(ge=0, le=1e6, description="open loop instead: Poisson arrivals a second")] = 0.0
    input_tokens: Annotated[int, Meta(ge=1, description="prompt length")] = 128
    output_tokens: Annotated[int, Meta(ge=1, description="tokens to ask for")] = 64
    shared_prefix: Annotated[int, Meta(ge=0, description="prompt tokens that all requests share")] = 0
    vocab_size: Annotated[int, Meta(ge=1, description="random ids stay below")] = 1000
    seed: Annotated[int, Meta(description="of prompts and arrivals")] = 0
    timeout: Annotated[float, Meta(gt=0, le=1e7, description="seconds for one request")] = 600.0
    api_key: Annotated[str, Meta(description="sent as a bearer token; better as TANDEM_API_KEY")] = ""


@dataclass(frozen=True)
class TraceOptions:
    """Options of `bench` for traces."""

    trace: Annotated[str, Meta(description="file: replay this trace instead of random prompts")] = ""
    speed: Annotated[float, Meta(gt=0, le=1e9, description="so many times faster")] = 1.0
    compare: Annotated[
        tuple[str, ...],
        Meta(description="URL: replay it through this router too, say one of another --placement; repeatable"),
    ] = ()
    limit: Annotated[int, Meta(ge=0, description="only the first so many requests; 0: all")] = 0
    trace_scale: Annotated[float, Meta(gt=0, le=1e9, description="lengths times this, for small models")] = 1.0
    simulate: Annotated[int, Meta(ge=0, description="so many simulated nodes, in virtual time, no server")] = 0
    policies: Annotated[str, Meta(description="placement policies to simulate: A,B")] = (
        "round_robin,least_loaded,prefix_aware"
    )
    gpu_tokens: Annotated[int, Meta(ge=1, description="KV of a node's GPU")] = 880_000
    host_tokens: Annotated[int, Meta(ge=0, description="KV of a node's host tier")] = 880_000
    fetch_rate: Annotated[
        float, Meta(ge=0, le=1e12, description="tokens a second from a peer's cache; 0: nodes don't")
    ] = 0.0
    routers: Annotated[int, Meta(ge=1, description="routers of as many hosts: each has its own view")] = 1
    redis: Annotated[str, Meta(description="URL of a real Redis to carry the directory; local: one is started")] = ""
    find_speed: Annotated[bool, Meta(description="find the highest speed factor that keeps --ttft-target")] = False
    ttft_target: Annotated[float, Meta(gt=0, le=1e7, description="seconds at p90, and for goodput")] = 2.0
    tpot_target: Annotated[float, Meta(gt=0, le=1e7, description="seconds, for goodput")] = 0.05


@dataclass(frozen=True)
class ExplainOptions:
    prompt: Annotated[str, Meta(description="text of the prompt")] = ""
    prompt_file: Annotated[str, Meta(description="file with the prompt instead; - for standard input")] = ""
    url: Annotated[str, Meta(description="router to ask")] = URL
    max_tokens: Annotated[int, Meta(ge=1, description="as in the request")] = 16
    api_key: Annotated[str, Meta(description="sent as a bearer token; better as TANDEM_API_KEY")] = ""


@dataclass(frozen=True)
class KernelsOptions:
    heads: Annotated[int, Meta(ge=1, description="query heads of a layer")] = 32
    kv_heads: Annotated[int, Meta(ge=1, description="KV heads")] = 8
    head_size: Annotated[int, Meta(ge=1, description="elements of a head")] = 128
    block_size: Annotated[int, Meta(ge=1, description="tokens of a KV block")] = 64
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="of the model; auto: bfloat16 on a GPU, float32 on the CPU"),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8_e4m3", "fp8"], Meta(description="of the KV cache; auto: the model's; fp8: fp8_e4m3")
    ] = "auto"
    sliding_window: Annotated[int, Meta(ge=0, description="tokens that a query sees; 0: all")] = 0
    soft_cap: Annotated[float, Meta(ge=0, le=1e9, description="scores are X * tanh(score / X); 0: as they are")] = 0.0
    alibi: Annotated[bool, Meta(description="with ALiBi's slopes")] = False
    rows: Annotated[int, Meta(ge=1, description="sequences of the decode step explained")] = 64
    length: Annotated[int, Meta(ge=1, description="their tokens in the cache")] = 2048
    device: Annotated[str, Meta(description="cuda, cuda:1, cpu; auto: a GPU if there is one")] = "auto"
    attention_backend: Annotated[str, Meta(description="test only this one; auto: all that fit")] = "auto"
    test: Annotated[bool, Meta(description="run and time the kernels; else only say what would be chosen")] = True
