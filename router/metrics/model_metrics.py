"""What requests to a model came to, by the names that vLLM has for the same, so that its dashboards show it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from tandem.router.metrics.catalog import VLLM

# Guesses: dense where targets for first tokens and for each token lie.
LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
TOKEN_BUCKETS_S = (0.001, 0.002, 0.004, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5)
LENGTH_BUCKETS = tuple(factor * 10**power for power in range(6) for factor in (1, 2, 5))  # tokens
LABELS = ("model_name",)


def bucket_counts(histogram: Histogram) -> tuple[int, ...]:
    """How often this process observed a value in each bucket, the last of which has no upper bound."""
    return tuple(int(bucket.get()) for bucket in histogram._buckets)


def count_of(counter: Counter) -> float:
    """What this process has counted."""
    found: float = counter._value.get()
    return found


class ModelFamilies:
    """The families of all models. Their series count from 0 for a model that ModelMetrics were made for."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def seconds(name: str, text: str, kind: type[Histogram] = Histogram) -> Histogram:
            buckets = TOKEN_BUCKETS_S if kind is WeightedHistogram else LATENCY_BUCKETS_S
            return kind(f"{VLLM}{name}_seconds", text, LABELS, buckets=buckets, registry=registry)

        def tokens(name: str, text: str) -> Histogram:
            return Histogram(f"{VLLM}{name}", text, LABELS, buckets=LENGTH_BUCKETS, registry=registry)

        self.queue_s = seconds("request_queue_time", "From a prompt's arrival to its placement")
        self.ttft_s = seconds("time_to_first_token", "From a prompt's arrival to its first token")
        self.itl_s = seconds("inter_token_latency", "Between two tokens of a sample", WeightedHistogram)
        self.e2e_s = seconds("e2e_request_latency", "From a prompt's arrival to its end")
        self.prompt_length = tokens("request_prompt_tokens", "Tokens of a prompt")
        self.output_length = tokens("request_generation_tokens", "Tokens that came of a prompt, all samples together")
        self.prompt_tokens = Counter(f"{VLLM}prompt_tokens", "Prompt tokens accepted", LABELS, registry=registry)
        self.output_tokens = Counter(f"{VLLM}generation_tokens", "Output tokens emitted", LABELS, registry=registry)
        self.success = Counter(
            f"{VLLM}request_success", "Samples that ended as they should, by how", [*LABELS, "finished_reason"],
            registry=registry,
        )  # fmt: skip


class ModelMetrics:
    """The series of one model."""

    def __init__(self, families: ModelFamilies, model_name: str) -> None:
        self.model_name = model_name
        self.queue_s = families.queue_s.labels(model_name)
        self.ttft_s = families.ttft_s.labels(model_name)
        self.itl_s = families.itl_s.labels(model_name)
        self.e2e_s = families.e2e_s.labels(model_name)
        self.prompt_length = families.prompt_length.labels(model_name)
        self.output_length = families.output_length.labels(model_name)
        self.prompt_tokens = families.prompt_tokens.labels(model_name)
        self.output_tokens = families.output_tokens.labels(model_name)
        self.success = {reason: families.success.labels(model_name, reason) for reason in ("stop", "length")}

    def observe_step(self, gaps_s: dict[float, int], num_tokens: int) -> None:
        """Counts what one message brought: gap between tokens in seconds -> how often it occurred, and the number of
        tokens. Most gaps of a step are equal, since the tokens before came in one message too."""
        assert isinstance(self.itl_s, WeightedHistogram)
        for gap_s, count in gaps_s.items():
            self.itl_s.observe_many(gap_s, count)
        self.output_tokens.inc(num_tokens)


class WeightedHistogram(Histogram):
    """A histogram that counts many equal values at once."""

    def observe_many(self, amount: float, count: int) -> None:
        """Does what `observe(amount)` does, `count` times."""
        self._sum.inc(amount * count)
        for bound, bucket in zip(self._upper_bounds, self._buckets, strict=True):
            if amount <= bound:
                bucket.inc(count)
                break
