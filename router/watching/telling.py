"""One prompt's story in times and words: what its router noted and what its nodes did, in one order. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.engine.contracts.wire.operate import NodeMoment, Story
from tandem.router.recent.story import RequestStory, StoryMoment

# What a node's messages mean, for people. Others are left out: their other end tells the same.
MEANINGS = {
    "received Submit": "hears of the request",
    "sent KVClaim": "asks for blocks for its KV",
    "sent KVWait": "has no blocks for its KV yet",
    "sent KVGrant": "gives blocks for its KV",
    "sent KVReady": "has pushed all KV, and says its digests",
    "received KVReady": "has all KV and verifies it",
    "sent KVResend": "found KV that is not what was sent, and asks for it again",
    "sent KVRefused": "refuses the KV",
    "sent KVCommitted": "has verified the KV and goes on",
    "sent KVRelease": "lets go of the hand-off",
}
KINDS = {"sent KVCommitted": "commit", "received KVReady": "verify", "sent KVReady": "ready"}


def told(story: RequestStory, answers: Mapping[str, tuple[Story, float]], now: float) -> dict[str, Any]:
    """A story for JSON. `answers`: by node, what it told, and when (monotonic seconds) that came."""
    moments = [_of_router(story, moment) for moment in story.moments]
    for node, (answer, came_at) in answers.items():
        moments += [shown for moment in answer.moments if (shown := _of_node(story, node, moment, came_at)) is not None]
    moments.sort(key=lambda moment: moment["at_s"])
    _time_verification(moments)
    if story.first_token_at is not None and story.last_token_at > story.first_token_at:
        moments.append(_of_tokens(story))
        moments.sort(key=lambda moment: moment["at_s"])  # by when it began, as all others
    return {
        **story.summary(now),
        "max_tokens": story.max_tokens,
        "samples": story.num_samples,
        "targets_s": {"ttft": story.targets.ttft_s or None, "tpot": story.targets.tpot_s or None},
        "longest_gap_s": round(story.longest_gap_s, 5),
        "silent_nodes": sorted({key.node_id for key in story.asked} - answers.keys()),
        "moments": moments,
    }


def _moment(story: RequestStory, at: float, lasts_s: float, where: str, kind: str, text: str, **facts: Any) -> Any:
    """A moment that ended `at`. A node's clock and the way of its answer make it inexact by about a millisecond."""
    begin = max(0.0, at - lasts_s - story.started_at)
    return {"at_s": round(begin, 5), "lasts_s": round(lasts_s, 5), "where": where, "kind": kind, "text": text, **facts}


def _of_router(story: RequestStory, moment: StoryMoment) -> dict[str, Any]:
    facts = moment.facts
    node = facts.get("node", "")
    texts = {
        "placed": lambda: f"is placed on {' and '.join(facts['nodes'])}: {facts['reason']}",
        "accepted": lambda: f"{node} accepts it" + (f", {facts['cached']:,} tokens cached" if facts["cached"] else ""),
        "refused": lambda: f"{node} gives it up: {facts['why'] or facts['code']}",
        "node lost": lambda: f"{node} is lost: {facts['why']}",
        "moved": lambda: f"sample {facts['sample']} goes on at another node",
        "left": lambda: f"{node} has handed it over while it ran",
        "stayed": lambda: f"{node} was to hand it over, and keeps it: {facts['why']}",
        "first token": lambda: "first token",
        "end": lambda: "ends as it should" if facts["outcome"] == "finished" else f"ends by {facts['outcome']}",
    }
    text = texts[moment.what]()
    if moment.what == "placed":  # what it waited for until then
        waited_s = moment.at - story.started_at if facts["attempt"] == 1 else 0.0
        return _moment(story, moment.at, waited_s, "router", "queue", text)
    return _moment(story, moment.at, 0.0, "router", moment.what.replace(" ", "_"), text)


def _of_node(story: RequestStory, node: str, moment: NodeMoment, came_at: float) -> dict[str, Any] | None:
    at = came_at - moment.ago_s
    if moment.stage == "chunk":
        text = f"computes {moment.num_tokens:,} tokens of the prompt"
        return _moment(story, at, moment.lasts_s, node, "chunk", text, tokens=moment.num_tokens)
    if moment.stage == "pushed":
        layers = "all layers" if moment.first_layer < 0 else f"layers {moment.first_layer} to {moment.last_layer}"
        text = f"pushes {moment.num_bytes:,} bytes of KV of {layers}"
        return _moment(story, at, moment.lasts_s, node, "push", text, bytes=moment.num_bytes, layers=layers)
    if moment.stage not in MEANINGS:
        return None
    return _moment(story, at, 0.0, node, KINDS.get(moment.stage, "message"), MEANINGS[moment.stage])


def _time_verification(moments: list[dict[str, Any]]) -> None:
    """Gives verification its time, which messages mark: from when the KV was there to what its node said then."""
    begun: dict[str, dict[str, Any]] = {}
    for moment in moments:
        if moment["kind"] not in ("verify", "commit", "message"):
            continue
        if (verify := begun.pop(moment["where"], None)) is not None:
            verify["lasts_s"] = round(moment["at_s"] - verify["at_s"], 5)
        if moment["kind"] == "verify":
            begun[moment["where"]] = moment


def _of_tokens(story: RequestStory) -> dict[str, Any]:
    assert story.first_token_at is not None
    lasts_s = story.last_token_at - story.first_token_at
    gaps = f"; the longest pause was {story.longest_gap_s * 1e3:,.1f} ms" if story.longest_gap_s else ""
    text = f"{story.num_output_tokens:,} tokens{gaps}"
    facts = {"tokens": story.num_output_tokens}
    return _moment(story, story.last_token_at, lasts_s, story.nodes[-1] if story.nodes else "", "tokens", text, **facts)
