// Which charts there are: each line is a series of router/watching/points.py, its name, and its colour in style.css.

import * as units from "./units.js";

const P50_P95 = (name, colour) => [[`${name}95`, "p95", `${colour} faint`], [`${name}50`, "p50", colour]];

export const CHARTS = [
  { id: "ttft", title: "First token", unit: units.seconds, lines: P50_P95("ttft", "prompt"),
    help: "From a prompt's arrival to its first token, over the last 15 s" },
  { id: "itl", title: "Between tokens", unit: units.seconds, lines: P50_P95("itl", "token"),
    help: "Between two tokens of a stream, over the last 15 s" },
  { id: "tokens", title: "Throughput", unit: units.perSecond, help: "Tokens a second",
    lines: [["out_tokens", "output", "token"], ["in_tokens", "prompts", "prompt"]] },
  { id: "goodput", title: "Requests and goodput", unit: units.perSecond,
    help: "Prompts ended a second; kept and late are those with targets of their own",
    lines: [["finished", "finished", "plain"], ["kept", "promise kept", "good"], ["missed", "late", "warm"],
      ["failed", "failed", "bad"]] },
  { id: "queue", title: "Queue", unit: units.count, help: "Prompts and sequences that wait, and that run",
    lines: [["running", "running", "token"], ["queued", "wait at nodes", "prompt"], ["unplaced", "without a node", "bad"]] },
  { id: "slack", title: "Slack", unit: units.seconds, zero: true,
    help: "How much sooner than promised the first token came or may come, of the tightest prompt; below 0 it is late",
    lines: [["slack", "least slack", "good"]], notes: [["late", "late now", units.whole]] },
  { id: "kv", title: "KV in use", unit: units.share, most: 1, help: "Share of the room, of all nodes together",
    lines: [["kv_pool", "pools", "token"], ["kv_host", "host memory", "violet"], ["kv_disk", "disk", "warm"]] },
  { id: "hits", title: "Prompt tokens found", unit: units.share, most: 1, stacked: true,
    help: "Share of prompts' tokens that nobody had to compute, by where they were, over the last 15 s",
    lines: [["hit_pool", "pool", "token"], ["hit_host", "host", "violet"], ["hit_disk", "disk", "warm"],
      ["hit_peer", "other nodes", "good"]] },
  { id: "transfers", title: "KV on the move", unit: units.bytesPerSecond, help: "Bytes a second, all nodes together",
    lines: [["pushed", "pushed", "prompt"], ["loaded", "from tiers", "violet"]],
    notes: [["push_rate", "while pushing", units.bytesPerSecond]] },
  { id: "gap", title: "Gap of a hand-off", unit: units.seconds, lines: P50_P95("gap", "violet"),
    help: "From the first token, of the node that computed the prompt, to the next, of another; over the last 15 s",
    notes: [["handoffs", "hand-offs", units.perSecond], ["redone", "failed", units.perSecond]] },
  { id: "lean", title: "What nodes are busy with", unit: units.share, most: 1, stacked: true,
    help: "Share of all nodes' time in steps, by what the steps are for: how the cluster leans",
    lines: [["busy_prompts", "prompts", "prompt"], ["busy_tokens", "tokens", "token"]] },
  { id: "slow", title: "Slow steps, by reason", unit: units.perSecond, stacked: true,
    help: "Steps above --slow-step-ms, by what was slow (docs/profiling.md)",
    lines: [["slow_steps_prompt", "prompt", "prompt"], ["slow_steps_schedule", "schedule", "violet"],
      ["slow_steps_launch", "launch", "token"], ["slow_steps_device", "device", "good"],
      ["slow_steps_results", "results", "warm"], ["slow_steps_events", "events", "plain"],
      ["slow_steps_urgent", "urgent", "bad"], ["slow_steps_upkeep", "upkeep", "mild"]] },
];
