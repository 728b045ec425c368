"""Options of the commands that talk to servers, measure and explain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from tandem.engine.contracts.config import Count, Device, Positive
from tandem.engine.contracts.wire.profile import MAX_SECONDS, MAX_STEPS

URL = "http://127.0.0.1:8000"
ADMIN_KEY = "sent as a bearer token, with the scope admin; better as TANDEM_API_KEY"


@dataclass(frozen=True)
class BenchOptions:
    """Options of `tandem bench`."""

    url: Annotated[str, "server to measure"] = URL
    model: Annotated[str, "model name to ask for; default: the first that the server lists"] = ""
    endpoint: Annotated[Literal["completions", "chat"], "what to ask"] = "completions"
    dataset: Annotated[Literal["random", "sharegpt"], "sharegpt: first questions of a file's conversations"] = "random"
    dataset_path: Annotated[str, "the file, JSON in ShareGPT's format"] = ""
    num_requests: Annotated[Positive, "requests in all"] = 100
    concurrency: Annotated[Count, "at most so many in flight; 0: 8, with --rate as many as come"] = 0
    rate: Annotated[float, Meta(ge=0), "open loop: Poisson arrivals a second; inf: all at once; 0: closed loop"] = 0.0
    max_seconds: Annotated[float, Meta(ge=0, le=1e7), "report what was measured after so long; 0: after all"] = 0.0
    input_tokens: Annotated[Positive, "length of random prompts"] = 128
    output_tokens: Annotated[Count, "tokens to ask for; 0: 64, with sharegpt about as many as were answered"] = 0
    shared_prefix: Annotated[Count, "prompt tokens that all requests share"] = 0
    vocab_size: Annotated[Positive, "random ids stay below"] = 1000
    seed: Annotated[int, "of prompts and arrivals"] = 0
    json: Annotated[bool, "print the report as JSON instead of a table"] = False
    output: Annotated[str, "file for the report, as JSON"] = ""
    picture: Annotated[str, "file for a picture of it, as SVG: distributions, and what came over time"] = ""
    timeout: Annotated[float, Meta(gt=0, le=1e7), "seconds for one request"] = 600.0
    api_key: Annotated[str, "sent as a bearer token; better as TANDEM_API_KEY"] = ""


@dataclass(frozen=True)
class TraceOptions:
    """Options of `bench` for traces."""

    trace: Annotated[str, "file: replay this trace instead of random prompts"] = ""
    speed: Annotated[float, Meta(gt=0, le=1e9), "so many times faster"] = 1.0
    compare: Annotated[
        tuple[str, ...],
        "URL: replay it through this router too, say one of another --placement; repeatable",
    ] = ()
    limit: Annotated[Count, "only the first so many requests; 0: all"] = 0
    trace_scale: Annotated[float, Meta(gt=0, le=1e9), "lengths times this, for small models"] = 1.0
    simulate: Annotated[str, "simulated nodes, in virtual time, no server: 4, or prefill and decode nodes as 2+2"] = ""
    deadlines: Annotated[bool, "simulated nodes keep --ttft-target and --tpot-target (docs/deadlines.md)"] = False
    leanings: Annotated[bool, "simulated nodes do all work, those of 2+2 are for it first (docs/leanings.md)"] = False
    keep_kv_once: Annotated[bool, "simulated nodes leave to peers what those keep (docs/kept_once.md)"] = False
    policies: Annotated[str, "placement policies to simulate: A,B"] = "round_robin,least_loaded,prefix_aware"
    gpu_tokens: Annotated[Positive, "KV of a node's GPU"] = 880_000
    host_tokens: Annotated[Count, "KV of a node's host tier"] = 880_000
    fetch_rate: Annotated[float, Meta(ge=0, le=1e12), "tokens a second from a peer's cache; 0: nodes don't"] = 0.0
    routers: Annotated[Positive, "routers of as many hosts: each has its own view"] = 1
    redis: Annotated[str, "URL of a real Redis to carry the directory; local: one is started"] = ""
    find_speed: Annotated[bool, "find the highest speed factor that keeps --ttft-target"] = False
    ttft_target: Annotated[float, Meta(gt=0, le=1e7), "seconds at p90, and for goodput"] = 2.0
    tpot_target: Annotated[float, Meta(gt=0, le=1e7), "seconds, for goodput"] = 0.05


@dataclass(frozen=True)
class TalkOptions:
    """What `tandem chat` and `tandem complete` have in common."""

    url: Annotated[str, "server to ask"] = URL
    model: Annotated[str, "model name to ask for; default: the first that the server lists"] = ""
    api_key: Annotated[str, "sent as a bearer token; better as TANDEM_API_KEY"] = ""
    max_tokens: Annotated[Count, "longest answer; 0: as the server likes it (`complete`: 128)"] = 0
    temperature: Annotated[float, Meta(ge=-1, le=100), "-1: the server's default"] = -1.0
    top_p: Annotated[float, Meta(ge=-1, le=1), "-1: the server's default"] = -1.0


@dataclass(frozen=True)
class ChatOptions(TalkOptions):
    """Options of `tandem chat`."""

    message: Annotated[str, "ask this alone; left out: a conversation, or what standard input holds"] = ""
    system_prompt: Annotated[str, "what the conversation begins with"] = ""


@dataclass(frozen=True)
class CompleteOptions(TalkOptions):
    """Options of `tandem complete`."""

    prompt: Annotated[str, "complete this alone; left out: what is typed, or what standard input holds"] = ""


@dataclass(frozen=True)
class ExplainOptions:
    """Options of `tandem explain`."""

    prompt: Annotated[str, "text of the prompt"] = ""
    prompt_file: Annotated[str, "file with the prompt instead; - for standard input"] = ""
    url: Annotated[str, "router to ask"] = URL
    model: Annotated[str, "model or adapter to ask for; default: the first that the server lists"] = ""
    max_tokens: Annotated[Positive, "as in the request"] = 16
    api_key: Annotated[str, "sent as a bearer token; better as TANDEM_API_KEY"] = ""


@dataclass(frozen=True)
class CalibrateOptions:
    """Options of `tandem calibrate`."""

    model: Annotated[str, "folder in Hugging Face format, or a hub name; left out: the demo model"]
    prompts_file: Annotated[str, "text file, a prompt a line; left out: a few texts that come with Tandem"] = ""
    output: Annotated[str, "file for the scales, for --kv-scales"] = "kv_scales.json"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        "type of weights and of the KV that is measured; auto: as served",
    ] = "auto"
    device: Annotated[Device, "auto: the GPU where there is one"] = "auto"
    revision: Annotated[str, "hub revision to load; empty: the default branch"] = ""


@dataclass(frozen=True)
class ProfileOptions:
    """Options of `tandem profile`."""

    url: Annotated[str, "router whose nodes are profiled while they serve"] = URL
    seconds: Annotated[float, Meta(gt=0, le=MAX_SECONDS), "how long at most"] = 5.0
    steps: Annotated[int, Meta(ge=1, le=MAX_STEPS), "steps of each node at most"] = 32
    layers: Annotated[bool, "time by layer, for which a GPU runs the profiled steps without graphs"] = True
    output: Annotated[str, "folder for reports (JSON), pictures (SVG) and traces (Perfetto)"] = "profile"
    api_key: Annotated[str, ADMIN_KEY] = ""


@dataclass(frozen=True)
class PlanOptions:
    """Options of `tandem plan`."""

    trace: Annotated[str, "the load: a trace, or a router's request log as JSON (docs/planning.md)"] = ""
    ttft_target_ms: Annotated[float, Meta(gt=0, le=1e7), "within which a request's first token is to come"] = 2000.0
    tpot_target_ms: Annotated[float, Meta(gt=0, le=1e7), "that each token after it may take on average"] = 50.0
    good_percent: Annotated[float, Meta(gt=0, le=100), "of requests that are to keep both"] = 90.0
    margin_percent: Annotated[float, Meta(ge=0, le=100), "asked of the simulation beyond that, since it flatters"] = 5.0
    gpus_max: Annotated[Positive, "no plan with more GPUs"] = 16
    gpus_per_node: Annotated[Positive, "GPUs of each node (--tensor-parallel-size)"] = 1
    speed: Annotated[float, Meta(gt=0, le=1e9), "plan for so many times the load"] = 1.0
    prompt_rate: Annotated[float, Meta(ge=0, le=1e9), "prompt tokens a second of a node; 0: an 8B model's, H200"] = 0.0
    step_ms: Annotated[float, Meta(ge=0, le=1e5), "of a decode step of one sequence; 0: an 8B model's, H200"] = 0.0
    gpu_tokens: Annotated[Positive, "KV of a node's GPU"] = 880_000
    host_tokens: Annotated[Count, "KV of a node's host tier"] = 880_000
    json: Annotated[bool, "print all that was tried as JSON instead of a table"] = False


@dataclass(frozen=True)
class StatusOptions:
    """Options of `tandem status`."""

    url: Annotated[str, "router to ask"] = URL
    watch: Annotated[float, Meta(ge=0, le=3600), "look again so many seconds later, until Ctrl-C; 0: once"] = 0.0
    json: Annotated[bool, "print the answer as JSON instead of a table"] = False
    api_key: Annotated[str, ADMIN_KEY] = ""


@dataclass(frozen=True)
class DrainOptions:
    """Options of `tandem drain`."""

    node: Annotated[str, "the node, as `tandem status` shows it"] = ""
    undo: Annotated[bool, "have it take requests again"] = False
    wait_s: Annotated[float, Meta(ge=0, le=1e6), "wait so long for what runs there to end or move"] = 0.0
    url: Annotated[str, "router to ask"] = URL
    json: Annotated[bool, "print the answer as JSON"] = False
    api_key: Annotated[str, ADMIN_KEY] = ""


@dataclass(frozen=True)
class RoleOptions:
    """Options of `tandem role`."""

    node: Annotated[str, "the node, as `tandem status` shows it"] = ""
    new_role: Annotated[str, "prefill, decode or unified"] = ""
    url: Annotated[str, "router to ask"] = URL
    json: Annotated[bool, "print the answer as JSON"] = False
    api_key: Annotated[str, ADMIN_KEY] = ""


@dataclass(frozen=True)
class StoryOptions:
    """Options of `tandem trace`."""

    request_id: Annotated[str, "the answer's id, or its X-Request-Id; left out: the newest requests"] = ""
    picture: Annotated[str, "file for a picture of its story, as SVG"] = ""
    url: Annotated[str, "router to ask"] = URL
    json: Annotated[bool, "print the answer as JSON"] = False
    api_key: Annotated[str, ADMIN_KEY] = ""


@dataclass(frozen=True)
class ScaleOptions:
    """Options of `tandem scale`."""

    url: Annotated[str, "router whose /metrics say what is lacking"] = URL
    pool: Annotated[
        tuple[str, ...], "ROLE=DEPLOYMENT:LEAST:MOST, a pool and its bounds; repeatable, one for each role"
    ] = ()
    namespace: Annotated[str, "of the Deployments; in a pod: its own"] = ""
    api_server: Annotated[str, "URL of Kubernetes' API, such as `kubectl proxy` has; in a pod: the cluster's"] = ""
    token_file: Annotated[str, "bearer token for it; in a pod: its service account's"] = ""
    idle_s: Annotated[float, Meta(ge=0, le=1e6), "fewer nodes must have been enough for so long before one goes"] = (
        300.0
    )
    every_s: Annotated[float, Meta(gt=0, le=3600), "between two looks"] = 5.0
    dry_run: Annotated[bool, "say what would be changed, and change nothing"] = False
    once: Annotated[bool, "look once; exit code 1 if somebody did not answer"] = False


@dataclass(frozen=True)
class KernelsOptions:
    """Options of `tandem kernels`."""

    heads: Annotated[Positive, "query heads of a layer"] = 32
    kv_heads: Annotated[Positive, "KV heads"] = 8
    head_size: Annotated[Positive, "elements of a head"] = 128
    block_size: Annotated[Positive, "tokens of a KV block"] = 64
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        "of the model; auto: bfloat16 on a GPU, float32 on the CPU",
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8_e4m3", "fp8"], "of the KV cache; auto: the model's; fp8: fp8_e4m3"
    ] = "auto"
    sliding_window: Annotated[Count, "tokens that a query sees; 0: all"] = 0
    soft_cap: Annotated[float, Meta(ge=0, le=1e9), "scores are X * tanh(score / X); 0: as they are"] = 0.0
    alibi: Annotated[bool, "with ALiBi's slopes"] = False
    rows: Annotated[Positive, "sequences of the decode step explained"] = 64
    length: Annotated[Positive, "their tokens in the cache"] = 2048
    device: Annotated[str, "cuda, cuda:1, cpu; auto: a GPU if there is one"] = "auto"
    attention_backend: Annotated[str, "test only this one; auto: all that fit"] = "auto"
    test: Annotated[bool, "run and time the kernels; else only say what would be chosen"] = True
    tune: Annotated[
        str, "folder or hub name of a model whose matrix products are measured instead, for a table of this device"
    ] = ""
    tune_seconds: Annotated[float, Meta(gt=0, le=86400), "how long it may take"] = 540.0
    tune_into: Annotated[str, "file that the table is added to; left out: where nodes of this machine look"] = ""
    tensor_parallel_size: Annotated[Positive, "GPUs that share the model that is tuned for"] = 1
