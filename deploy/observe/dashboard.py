"""A Grafana dashboard of a cluster. `tandem.deploy.observe.write` writes it to a file that Grafana imports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT, ACROSS = 8, 8, 3  # of a panel, in Grafana's units: 24 are a row
_SOURCE = {"type": "prometheus", "uid": "${source}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph. `queries`: (PromQL, legend)."""

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    text: str = ""
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: Sequence[Panel]


def _rate(name: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({name}[$__rate_interval]))"


def _per(name: str, of: str) -> str:
    """The query for the growth of a counter per growth of the counter `of`, for each node."""
    return f"{_rate(name, 'node')} / {_rate(of, 'node')}"


def _quantiles(name: str) -> list[tuple[str, str]]:
    return [(f"histogram_quantile({q}, {_rate(name + '_bucket', 'le')})", f"p{q * 100:g}") for q in (0.5, 0.9, 0.99)]


def _shares(parts: Sequence[tuple[str, str]], whole: str) -> list[tuple[str, str]]:
    return [(f"{_rate(name)} / {_rate(whole)}", legend) for name, legend in parts]


_HITS = "tandem_node_tier_hit_tokens_total"
ROWS = (
    Row("What clients see", (
        Panel("First token", "s", _quantiles("vllm:time_to_first_token_seconds")),
        Panel("Between tokens", "s", _quantiles("vllm:inter_token_latency_seconds")),
        Panel("Whole requests", "s", _quantiles("vllm:e2e_request_latency_seconds")),
        Panel("Tokens a second", "short", [
            (_rate("vllm:generation_tokens_total"), "output"), (_rate("vllm:prompt_tokens_total"), "prompt")]),
        Panel("Answers a second, by status", "reqps", [
            (_rate("tandem_router_responses_total", "status"), "{{status}}")], stacked=True),
        Panel("Ends of prompts, by outcome", "reqps", [
            (_rate("tandem_router_prompts_ended_total", "outcome"), "{{outcome}}")], stacked=True),
    )),
    Row("Load", (
        Panel("Running", "short", [("vllm:num_requests_running", "{{node}}")], "Sequences in each node's batch"),
        Panel("Waiting", "short", [("vllm:num_requests_waiting", "{{node}}")]),
        Panel("Prompt tokens that wait", "short", [("tandem_node_waiting_prompt_tokens", "{{node}}")]),
        Panel("Busy", "percentunit", [(_rate("tandem_node_busy_seconds_total", "node"), "{{node}}")],
              "Share of the time with a step launched"),
        Panel("Wait for a place", "s", _quantiles("vllm:request_queue_time_seconds")),
        Panel("Nodes that lack or are spare", "short", [
            (_rate("tandem_router_late_work_seconds_total"), "lack"), ("max(tandem_router_spare_nodes)", "spare")],
            "Work a second by which somebody is late; time that what is promised leaves"),
        Panel("Wait on nodes", "s", _quantiles("tandem_node_queue_seconds"), "Of prompts, for their first step"),
        Panel("Why there", "reqps", [(_rate("tandem_router_placements_total", "reason"), "{{reason}}")], stacked=True),
    )),
    Row("KV cache", (
        Panel("Pool in use", "percentunit", [("vllm:kv_cache_usage_perc", "{{node}}")]),
        Panel("Prompt tokens found", "percentunit", [
            *_shares([("vllm:prefix_cache_hits_total", "all")], "vllm:prefix_cache_queries_total"),
            (f"{_rate(_HITS, 'tier')} / ignoring (tier) group_left {_rate('vllm:prefix_cache_queries_total')}",
             "from {{tier}}"),
            *_shares([("tandem_node_pulled_tokens_total", "from peers")], "vllm:prefix_cache_queries_total")],
            "Share of prompt tokens that were not computed"),
        Panel("Tiers", "short", [("sum by (tier) (tandem_node_tier_blocks)", "{{tier}}"),
                                 ("sum by (tier) (tandem_node_tier_capacity_blocks)", "room of {{tier}}")],
              "Blocks that tiers hold and have room for"),
        Panel("Taken from running sequences", "short", [(_rate("vllm:num_preemptions_total", "node"), "{{node}}")]),
        Panel("Fragmentation", "percentunit", [("tandem_node_kv_fragmentation", "{{node}}")]),
        Panel("Read and written by tiers", "Bps", [
            (_rate("tandem_node_tier_saved_bytes_total"), "to host"),
            (_rate("tandem_node_tier_loaded_bytes_total"), "from host"),
            (_rate("tandem_node_tier_spilled_bytes_total"), "to disk"),
            (_rate("tandem_node_tier_fetched_bytes_total"), "from disk")]),
    )),
    Row("Hand-offs and moves", (
        Panel("Pushed", "Bps", [(_rate("tandem_node_kv_pushed_bytes_total", "node"), "{{node}}")]),
        Panel("Rate of a push", "Bps", [
            (_per("tandem_node_kv_pushed_bytes_total", "tandem_node_kv_push_seconds_sum"), "{{node}}")]),
        Panel("A push", "s", _quantiles("tandem_node_kv_push_seconds"), "On a GPU its launch"),
        Panel("Check of a hand-off", "s", _quantiles("tandem_node_kv_verify_seconds")),
        Panel("Hand-offs a second", "short", [
            (_rate("tandem_node_handoffs_in_total"), "committed"),
            (_rate("tandem_node_handoffs_in_recomputed_total"), "computed again"),
            (_rate("tandem_node_handoffs_in_failed_total"), "failed")]),
        Panel("Pulls a second", "short", [
            (_rate("tandem_node_pulls_completed_total"), "came"),
            (_rate("tandem_node_pulls_failed_total"), "did not come"),
            (_rate("tandem_node_pulls_declined_total"), "not asked for")]),
        Panel("Gap of a hand-off", "s", _quantiles("tandem_router_handoff_gap_seconds"),
              "From the first token, of the node that computed the prompt, to the next, of another"),
        Panel("Pause of moved streams", "s", _quantiles("tandem_router_migration_pause_seconds")),
        Panel("Retries and losses", "short", [
            (_rate("tandem_router_retries_total"), "retries"),
            (_rate("tandem_router_nodes_lost_total"), "nodes lost")]),
    )),
    Row("Steps", (
        Panel("A step", "s", _quantiles("tandem_node_step_seconds"), "Of those that follow another at once"),
        Panel("Steps a second", "short", [(_rate("tandem_node_steps_total", "node"), "{{node}}")]),
        Panel("Rows a step", "short", [
            (_per("tandem_node_step_rows_total", "tandem_node_steps_total"), "{{node}}")]),
        Panel("Fill of steps", "percentunit", [
            (_per("tandem_node_step_fill_total", "tandem_node_steps_total"), "{{node}}")]),
        Panel("Where the loop's time goes", "percentunit", [
            (_rate("tandem_node_turn_seconds_total", "part"), "{{part}}")], stacked=True),
        Panel("Slow steps, by reason", "short", [(_rate("tandem_node_slow_steps_total", "reason"), "{{reason}}")],
              stacked=True),
        Panel("What should not be", "short", [
            (_rate("tandem_node_kv_blocks_bad_total"), "damaged blocks"),
            (_rate("tandem_node_attention_fallbacks_total"), "kernels that failed"),
            (_rate("tandem_node_steps_out_of_memory_total"), "out of memory"),
            (_rate("tandem_node_kv_overflows_total"), "KV overflows")]),
    )),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana 10 and later import it; the data source is asked for there."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in ROWS:
        panels.append({"type": "row", "title": row.title, "id": len(panels) + 1, "collapsed": False, "panels": [],
                       "gridPos": {"h": 1, "w": 24, "x": 0, "y": top}})  # fmt: skip
        for index, panel in enumerate(row.panels):
            place = {"h": HEIGHT, "w": WIDTH, "x": index % ACROSS * WIDTH, "y": top + 1 + index // ACROSS * HEIGHT}
            panels.append(_graph(panel, len(panels) + 1, place))
        top += 1 + -(-len(row.panels) // ACROSS) * HEIGHT
    return {
        "title": "Tandem",
        "uid": "tandem",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "tags": ["tandem", "llm"],
        "templating": {
            "list": [{"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}]
        },
        "panels": panels,
    }


def _graph(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    custom = {"fillOpacity": 20 if panel.stacked else 5, "showPoints": "never",
              "stacking": {"mode": "normal" if panel.stacked else "none"}}  # fmt: skip
    return {
        "type": "timeseries",
        "id": number,
        "title": panel.title,
        "description": panel.text,
        "gridPos": place,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }
