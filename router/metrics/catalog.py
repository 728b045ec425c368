"""The metrics that nodes report, by the names that `/metrics` shows them by (docs/metrics.md).

The one list of them: the exposition, what reads it back, dashboards, alert rules and the table in docs follow it.
A metric that means what one of vLLM's means has its name, so that dashboards made for vLLM show it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from tandem.engine.contracts.config import MOST_DRAFTS

Kind = Literal["counter", "gauge", "histogram"]
VLLM = "vllm:"  # the prefix of names that are vLLM's; those families have the label `model_name`


@dataclass(frozen=True, slots=True)
class NodeMetric:
    """A series of each node. `key` is a field of Status, or the name of one of its counters. A histogram's counter is
    the sum of durations, which are counted as `engine/contracts/wire/durations.py` says."""

    key: str
    family: str  # as in a HELP line: without the `_total` of a counter's series
    kind: Kind
    text: str
    label: str = ""  # of a family with several series of a node
    value: str = ""  # of that label

    @property
    def series(self) -> str:
        """The name in a query; of a histogram, the sum's."""
        return self.family + {"counter": "_total", "histogram": "_sum", "gauge": ""}[self.kind]


def _node(kind: Kind, rows: Mapping[str, tuple[str, str]]) -> Iterator[NodeMetric]:
    """Metrics of `rows`: key -> (name, text). A name without a prefix gets ours."""
    for key, (name, text) in rows.items():
        yield NodeMetric(key, name if ":" in name else f"tandem_node_{name}", kind, text)


def _each(kind: Kind, label: str, key: str, name: str, text: str, values: Iterable[str]) -> Iterator[NodeMetric]:
    """A family with a series for each of `values`, which stands for {} in `key`."""
    for value in values:
        yield NodeMetric(key.format(value), name if ":" in name else f"tandem_node_{name}", kind, text, label, value)


_GAUGES = {
    "num_running": ("vllm:num_requests_running", "Requests in the running batch"),
    "num_waiting": ("vllm:num_requests_waiting", "Requests that wait for a slot or for blocks"),
    "num_waiting_tokens": ("waiting_prompt_tokens", "Prompt tokens accepted and not yet computed"),
    "kv_used_share": ("vllm:kv_cache_usage_perc", "Share of KV blocks that somebody holds, 0 to 1"),
    "num_blocks": ("kv_blocks", "KV blocks of the pool"),
    "num_free_blocks": ("kv_blocks_free", "KV blocks that nobody holds; what is cached in them counts"),
    "blocks_cached": ("kv_blocks_cached", "KV blocks whose content can be found by its hash"),
    "block_size": ("kv_block_tokens", "Tokens of a KV block"),
    "kv_fragmentation": ("kv_fragmentation", "Share of running sequences' KV slots that hold no token, 0 to 1"),
    "draining": ("draining", "1: it takes nothing new and ends when it is done"),
    "prefill_s_per_token": ("prompt_token_seconds", "What a prompt token takes now; 0: not measured"),
    "transfer_s_per_token": ("push_token_seconds", "What a token's KV takes to push; 0: not measured"),
    "fetch_s_per_token": ("pull_token_seconds", "What a token's KV takes to pull; 0: not measured, or it never pulls"),
    "leans_prefill": ("leans_to_prompts", "1: it does all work, and is for prompts first (docs/elastic.md)"),
    "leans_decode": ("leans_to_streams", "1: it does all work, and is for streams first"),
    "adapter_slots_used": ("adapter_slots_used", "Slots whose LoRA adapter some running sequence has"),
    "adapter_host_bytes": ("adapter_host_bytes", "Bytes of LoRA adapters in host memory"),
    "expert_imbalance": (
        "expert_imbalance",
        "Tokens of a layer's busiest expert over its experts' mean, averaged over layers (docs/mixtures_of_experts.md)",
    ),
    "expert_imbalance_worst": ("expert_imbalance_worst", "The same of the layer that is least even"),
    "expert_rank_imbalance": (
        "expert_rank_imbalance",
        "Tokens of the busiest GPU's experts over the mean, averaged over layers (--enable-expert-parallel)",
    ),
    "directory_connected": ("directory_connected", "1: Redis takes what this node has cached"),
    "directory_blocks": ("directory_blocks", "Blocks that the directory names for this node"),
    "directory_generations": ("directory_generation", "How often this node has announced itself anew"),
}
_COUNTERS = {
    "requests_accepted": ("requests_accepted", "Requests taken in"),
    "requests_ended": ("requests_ended", "Requests ended, whatever way"),
    "request_faults": ("request_faults", "Requests ended by a fault of their own step"),
    "leaning_changes": ("leaning_changes", "Times that it came to lean the other way"),
    "preemptions": ("vllm:num_preemptions", "Running sequences that lost their blocks"),
    "spec_drafts": ("vllm:spec_decode_num_drafts", "Sequences of steps that had tokens guessed ahead"),
    "spec_draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Tokens that were guessed ahead and checked"),
    "spec_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens", "Of those, tokens that were right"),
    "prompt_tokens": ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    "cached_tokens": ("vllm:prefix_cache_hits", "Prompt tokens that were not computed, wherever they came from"),
    "allocate_s": ("allocate_seconds", "Seconds in which blocks were found; part of turn_seconds of schedule"),
    "busy_s": ("busy_seconds", "Seconds with a step launched; its rate is the busy share"),
    "steps_read": ("steps", "Steps"),
    "step_rows": ("step_rows", "Rows of all steps"),
    "step_tokens": ("step_tokens", "Tokens of all steps"),
    "batch_fill": ("step_fill", "How full steps were, summed: divided by steps, 0 to 1"),
    "steps_out_of_memory": (
        "steps_out_of_memory",
        "Steps computed in pieces or given up, since a device had no memory left",
    ),
    "steps_launched": (
        "steps_launched",
        "Passes launched kernel by kernel, for which there is no graph; also at the start",
    ),
    "attention_fallbacks": (
        "attention_fallbacks",
        "Launches that failed: the next backend, or torch, computed the step",
    ),
    "kernels_compiled_late": ("kernels_compiled_late", "Kernels compiled after the start"),
    "expert_tokens": ("expert_tokens", "Times that tokens chose experts, over all layers"),
    "kv_overflows": ("kv_overflows", "Values too large for the cache's format"),
    "kv_overflow_requests": ("kv_overflow_requests", "Attempts whose KV the cache's format could not hold"),
    "precise_kv_requests": ("precise_kv_requests", "Attempts served with 16-bit KV beside the pool"),
    "kv_quality_samples": ("kv_quality_samples", "Rows computed again without a cache (--kv-quality-sample-rate)"),
    "kv_quality_error": ("kv_quality_error", "Their logits' relative errors, summed: divided by samples, the mean"),
    "kv_quality_changes": ("kv_quality_changes", "Those of them whose most likely token the cache changed"),
    "kv_jobs": ("kv_jobs", "Jobs of the transfer thread"),
    "kv_pushed_bytes": ("kv_pushed_bytes", "Bytes of KV pushed to others"),
    "kv_push_failures": ("kv_push_failures", "Pushes that failed"),
    "kv_digest_passes": ("kv_digest_passes", "Digests made by a pass over blocks of their own"),
    "kv_blocks_verified": ("kv_blocks_verified", "Blocks that came and were what was sent"),
    "kv_blocks_bad": ("kv_blocks_bad", "Blocks that came and were not what was sent"),
    "source_handoffs_completed": ("handoffs_out", "Hand-offs from here that a sink has committed"),
    "source_handoffs_failed": ("handoffs_out_failed", "Hand-offs from here that failed"),
    "source_grants_refused": ("grants_refused", "Grants that made no sense, refused as a source"),
    "source_messages_dropped": ("source_messages_dropped", "Messages for no live hand-off from here"),
    "source_events_dropped": ("source_events_dropped", "Events for no live hand-off from here"),
    "source_verbs_resent": ("source_verbs_resent", "Messages of hand-offs from here that were sent again"),
    "source_retires_overdue": ("source_retires_overdue", "Hand-offs from here whose end took too long"),
    "sink_commits": ("handoffs_in", "Hand-offs to here that were committed"),
    "sink_recomputes": ("handoffs_in_recomputed", "Hand-offs to here whose prompt was computed again"),
    "sink_failures": ("handoffs_in_failed", "Hand-offs to here that failed"),
    "sink_digest_mismatches": ("digest_mismatches", "Hand-offs to here in which a block was not what was sent"),
    "sink_foreign_messages": ("sink_messages_dropped", "Messages for no live hand-off to here"),
    "sink_blocks_quarantined": ("blocks_quarantined", "Blocks kept back, since somebody might still write them"),
    "sink_quarantines_overdue": ("quarantines_overdue", "Quarantines that took too long"),
    "sink_ticket_loads": ("ticket_loads", "Tickets whose prefix was brought up from a tier"),
    "pull_asked": ("pulls_asked", "Prefixes asked of other nodes"),
    "pull_completed": ("pulls_completed", "Prefixes that came"),
    "pull_failed": ("pulls_failed", "Prefixes that did not come"),
    "pull_declined": ("pulls_declined", "Prefixes not asked for: computing was faster"),
    "shared_begun": ("shared_prompts", "Prompts that other nodes have helped this one to compute"),
    "shared_declined": ("shared_prompts_declined", "Prompts that were to be shared and were computed alone"),
    "shared_failed": ("shared_prompts_failed", "Attempts that ended since a node that helped did not go on"),
    "shared_tokens": ("shared_tokens", "Tokens of shared prompts that other nodes have computed for this one"),
    "pull_tokens": ("pulled_tokens", "Tokens that pulls brought"),
    "pull_served_blocks": ("pull_served_blocks", "Blocks given to other nodes' pulls"),
    "migrations_started": ("moves_started", "Running sequences that began to move away"),
    "migrations_finished": ("moves_finished", "Running sequences that moved away"),
    "migrations_failed": ("moves_failed", "Running sequences that were to move and stayed"),
    "migrations_tokens": ("moved_tokens", "Length of the sequences that moved away"),
    "control_undecodable": ("control_undecodable", "Messages that can't be read"),
    "control_unknown_peer": ("control_unknown_peer", "Messages of peers that have not greeted"),
    "control_refused": ("control_refused", "Greetings refused, here or there"),
    "control_lost_peers": ("control_lost_peers", "Peers lost"),
    "control_unroutable": ("control_unroutable", "Messages to peers that are gone"),
    "control_failures": ("control_failures", "Own faults over a peer's message; each cost a connection"),
    "directory_overflows": ("directory_overflows", "Times that too much changed to be told one by one"),
    "tier_saves": ("tier_saved_blocks", "Blocks copied to host memory"),
    "tier_saves_torn": ("tier_saves_torn", "Blocks given away while they were copied to host memory"),
    "tier_spills": ("tier_spilled_blocks", "Blocks copied to disk"),
    "tier_spills_failed": ("tier_spills_failed", "Blocks that could not be copied to disk"),
    "tier_disk_dropped": ("tier_disk_dropped", "Blocks on disk that were not what was written"),
    "tier_blocks_lost": ("tier_blocks_lost", "Blocks evicted from the device before they were saved"),
    "tier_blocks_given_up": ("tier_blocks_given_up", "Cached blocks to be reused first, since a peer keeps them"),
    "tier_blocks_left": ("tier_blocks_left", "Blocks evicted from the device and not saved, since a peer keeps them"),
    "tier_loads_failed": ("tier_loads_failed", "Loads from a tier that failed"),
    "tier_loads_declined": ("tier_loads_declined", "Requests for which computing was faster than loading"),
    "tier_saved_bytes": ("tier_saved_bytes", "Bytes copied to host memory"),
    "tier_loaded_bytes": ("tier_loaded_bytes", "Bytes copied from host memory"),
    "tier_spilled_bytes": ("tier_spilled_bytes", "Bytes written to disk"),
    "tier_fetched_bytes": ("tier_fetched_bytes", "Bytes read from disk"),
    "adapter_slot_loads": ("adapter_slot_loads", "LoRA adapters put into a slot"),
    "adapter_reads": ("adapter_reads", "LoRA adapters read from disk"),
    "media_encoded": ("media_encoded", "Images and sounds that were encoded"),
    "media_reused": ("media_reused", "Images and sounds whose encoding was still there"),
    "encoder_runs": ("encoder_runs", "Inputs that an encoder-decoder's encoder computed"),
    "encoder_positions_stored": ("encoder_positions_stored", "Positions of encoders' outputs put into the cache"),
}
_HISTOGRAMS = {
    "queue_s": ("queue_seconds", "From a prompt's coming to its first step"),
    "step_s": ("step_seconds", "Between the results of two steps of which one followed the other at once"),
    "kv_push_s": ("kv_push_seconds", "Of the transfer thread in a push; on a GPU, in launching it"),
    "kv_verify_s": ("kv_verify_seconds", "Of the transfer thread in checking what came of a hand-off"),
    "pull_seconds": ("pull_seconds", "From question to arrival, of pulls that came"),
    "migrations_pause_s": ("move_pause_seconds", "In which a sequence that moved away stood still here"),
}
_TIERS = ("host", "disk")
_TURN_PARTS = ("events", "upkeep", "schedule", "launch", "urgent", "device", "results")
_DRAFTS = tuple(map(str, range(MOST_DRAFTS)))  # places of drafts behind a sequence's newest token
_TRANSPORTS = ("local", "cuda_ipc", "shm", "nixl", "ucx", "tcp")

NODE_METRICS: tuple[NodeMetric, ...] = (
    *_node("gauge", _GAUGES),
    *_each("gauge", "tier", "tier_{}_blocks", "tier_blocks", "Blocks that a tier below the pool holds", _TIERS),
    *_each("gauge", "tier", "tier_{}_capacity", "tier_capacity_blocks", "Blocks that a tier has room for", _TIERS),
    *_node("counter", _COUNTERS),
    *_node("histogram", _HISTOGRAMS),
    *_each("counter", "position", "spec_accepted_at_{}", "vllm:spec_decode_num_accepted_tokens_per_pos",
           "Guessed tokens that were right, by their place behind the newest", _DRAFTS),
    *_each("counter", "tier", "tier_{}_hits", "tier_hit_blocks", "Blocks that a tier gave", _TIERS),
    *_each("counter", "tier", "tier_{}_hit_tokens", "tier_hit_tokens", "Prompt tokens that a tier gave", _TIERS),
    *_each("counter", "tier", "tier_{}_evictions", "tier_evictions", "Blocks that a tier gave up for others", _TIERS),
    *_each("counter", "part", "turn_{}_s", "turn_seconds", "Seconds of the step loop, by its parts", _TURN_PARTS),
    *_each("counter", "reason", "slow_steps_{}", "slow_steps", "Steps 1 ms beyond their target, by what was slow",
           (*_TURN_PARTS, "prompt")),
    *_each("counter", "transport", "kv_channels_{}", "kv_channels", "Channels opened to sinks", _TRANSPORTS),
)  # fmt: skip
IN_OTHERS = frozenset({"slow_steps"})  # keys that are the sum of a family
# What a node of another version reports and this list doesn't have.
UNKNOWN = "tandem_node_unlisted"
