"""All nodes that a router process knows: links, views, the model they serve, and placing onto them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

from tandem.engine.contracts.config import RouterOptions
from tandem.engine.contracts.directory import DirectoryReader
from tandem.engine.contracts.hashing import every_kth
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.model_folder import given_names
from tandem.engine.contracts.security import ClusterKeys
from tandem.engine.contracts.wire.adapters import Adapters, AdaptersKnown, LoadAdapter
from tandem.engine.contracts.wire.operate import Story
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.engine.contracts.wire.profile import Profiled
from tandem.engine.contracts.wire.requests import RequestFailed
from tandem.engine.process.process_log import RateLimited
from tandem.router.nodes.adapters import ServedAdapters
from tandem.router.nodes.answers import NodeAnswers
from tandem.router.nodes.discovery import NodeDiscovery
from tandem.router.nodes.link import AboutAdapters, NodeLink, RequestMessage, Verb
from tandem.router.nodes.node_socket import new_context
from tandem.router.nodes.served_model import ServedModel
from tandem.router.placing.elastic import ElasticPlacement, Plan
from tandem.router.placing.elastic_finder import find_elastic, plans
from tandem.router.placing.fleet_need import FleetNeed
from tandem.router.placing.forerunners import Forerunners
from tandem.router.placing.helpers import with_helpers
from tandem.router.placing.placement import Placement, PlacementRequest, find_placement, offers
from tandem.router.placing.policies import Choice, make_policy
from tandem.router.placing.readiness import describe, missing_roles
from tandem.router.placing.siblings import Siblings, Told
from tandem.router.placing.view import NodeView

logger = logging.getLogger(__name__)
repeated = RateLimited(logger)


class ClusterListener(Protocol):
    """What hears of a cluster's events, on the event loop."""

    def on_up(self, node: NodeKey) -> None: ...

    def on_message(self, node: NodeKey, message: RequestMessage) -> None: ...

    def on_lost(self, node: NodeKey, reason: str) -> None: ...

    def on_room(self) -> None:
        """Hears that placing may succeed now."""


class Cluster:
    """The nodes that one router process knows. `start()` must come before nodes are added."""

    def __init__(
        self,
        options: RouterOptions,
        keys: ClusterKeys,
        hello: NodeInfo,
        directory: DirectoryReader | None = None,
        siblings: Siblings | None = None,
        tokenizer: str = "",
    ) -> None:
        """`tokenizer`: the digest of the tokenizer that makes prompts here; a node that names another one is sent
        nothing."""
        self._options, self._keys, self._hello, self._directory = options, keys, hello, directory
        self._siblings = siblings
        self._context = new_context()
        self._links: dict[str, NodeLink] = {}
        self._links_by_key: dict[NodeKey, NodeLink] = {}
        self._views_by_tag: dict[int, NodeView] = {}
        self._left_out: dict[str, None] = {}  # addresses beyond `max_nodes`, the oldest first
        self._unlisted: set[str] = set()  # addresses whose record is gone while the node can be reached
        self._last_tick = time.monotonic()
        self._serving: list[NodeView] | None = None  # None: to be found out
        self.adapters = ServedAdapters(options.lora, self._say, lambda: [*self._links_by_key])
        self._policy, self.is_elastic = make_policy(options.placement, hello.epoch), options.placement == "elastic"
        self._rule = ElasticPlacement(options.prefill_nodes_per_prompt, options.prefill_shared_tokens)
        self.need, self.forerunners = FleetNeed(), Forerunners()
        self.model = ServedModel(given_names(options.model.served_name), tokenizer)
        self.profiles: NodeAnswers[Profiled] = NodeAnswers()
        self.stories: NodeAnswers[tuple[Story, float]] = NodeAnswers()  # and when each came
        self._listener: ClusterListener  # from `start` on

    # --- membership -------------------------------------------------------------------------------------------

    def start(self, listener: ClusterListener) -> None:
        """Connects to the nodes that were given (`--node`); `listener` hears of them, and of those added later."""
        self._listener = listener
        for address in self._options.nodes:
            self.add(address)

    def add(self, address: str) -> None:
        self._unlisted.discard(address)
        if len(self._links) >= self._options.max_nodes and address not in self._links:
            repeated.error("%s is not connected: there are %d nodes already (--max-nodes)", address, len(self._links))
            self._left_out[address] = None
        elif address not in self._links:
            self._left_out.pop(address, None)
            link = NodeLink(address, self._hello, self._context, self._keys, self._options.timeouts, self)
            self._links[address] = link
            link.open()

    def remove(self, address: str) -> None:
        """Notes that an address's record is gone: an unreachable node is forgotten, a reachable one is kept until it is
        lost. Addresses that were given (`--node`) are always kept."""
        self._left_out.pop(address, None)
        link = self._links.get(address)
        if link is None or address in self._options.nodes:
            return
        if link.view is not None:
            self._unlisted.add(address)
        else:
            self._links.pop(address).close()

    async def follow(self, discovery: NodeDiscovery) -> None:
        async for event in discovery.watch():
            (self.add if event.present else self.remove)(event.address)

    def tick(self, now: float) -> None:
        pause_s = max(0.0, now - self._last_tick - 2 * self._options.timeouts.heartbeat_s)
        self._last_tick = now
        self._hear_siblings(now)  # before the next pings: what they placed so far may be in the answers
        self.need.look((view.outlook for view in self.serving() if view.usable), now)
        if self._left_out and len(self._links) < self._options.max_nodes:
            self.add(next(iter(self._left_out)))
        for address, link in list(self._links.items()):
            try:
                if link.view is None and address in self._unlisted:
                    self._unlisted.discard(address)
                    self._links.pop(address).close()
                else:
                    link.tick(now, pause_s)
            except Exception:  # it costs this node's connection only: the others have their heartbeats and deadlines
                repeated.exception("the connection to %s failed", address)
                _fail(link)

    def close(self) -> None:
        for link in self._links.values():
            try:
                link.close()
            except Exception:
                logger.exception("the connection to %s can't be closed", link.address)
        self._links.clear()
        self._links_by_key.clear()
        self._views_by_tag.clear()
        self._serving = None
        self._context.destroy(linger=0)  # of what a failure left open: a `term` would wait for it without end

    # --- what is there ----------------------------------------------------------------------------------------

    @property
    def views(self) -> list[NodeView]:
        """Connected nodes, those of another model included."""
        return [link.view for link in self._links_by_key.values() if link.view is not None]

    def serving(self) -> list[NodeView]:
        """Connected nodes of the model that is served."""
        if self._serving is None:
            self._serving = [view for view in self.views if view.info.identity == self.model.identity]
        return self._serving

    @property
    def ready(self) -> bool:
        """Whether requests can be served: by a unified node, or by a decode node and a prefill node."""
        return not missing_roles(self.serving())

    def missing(self) -> str:
        """Why `ready` is False, for people."""
        return describe(self.serving(), list(self.unused().values()))

    def unused(self) -> dict[str, str]:
        """The addresses of nodes that nothing is sent to, and why, for people."""
        reasons = {}
        for link in self._links.values():
            differs = self.model.difference(link.view.info) if link.view is not None else ""
            if link.refusal or differs:
                reasons[link.address] = f"{link.address}: {link.refusal or differs}"
            elif link.trouble:
                reasons[link.address] = link.trouble
        return reasons

    def missing_roles(self) -> str:
        """What kinds of nodes are needed before a request can be served, for people; "" when none is missing."""
        return missing_roles(self.serving())

    def why_none_takes(self, num_tokens: int) -> str:
        """Why no node can have a request that may grow to `num_tokens` tokens, for people; "" when one can."""
        if missing := self.missing_roles():
            return f"{missing} takes requests"
        nodes = [view for view in self.serving() if view.role != "prefill"]
        if any(num_tokens <= view.most_tokens for view in nodes):
            return ""
        longest = max(view.info.max_model_len for view in nodes)
        return f"it may have {num_tokens} tokens, and the nodes that are connected take {longest}"

    def lacks_precise_kv(self, num_tokens: int) -> bool:
        """Whether nodes are connected that make tokens, and none of them has room for so much KV of 16 bits."""
        nodes = [view for view in self.serving() if view.role != "prefill"]
        return bool(nodes) and all(view.most_precise_tokens < num_tokens for view in nodes)

    def counters(self) -> dict[str, float]:
        """Figures of all connections, for /metrics."""
        links = self._links.values()
        return {
            "nodes_known": float(len(links)),
            "nodes_unreachable": float(sum(link.view is None for link in links)),
            "nodes_other_version": float(sum(view.info.version != self._hello.version for view in self.views)),
            "nodes_other_wire": float(sum(link.refused_field == "wire_version" for link in links)),
            "nodes_other_model": float(sum(bool(self.model.difference(view.info)) for view in self.views)),
            "failed_handshakes": float(sum(link.num_failed_handshakes for link in links)),
            "undecodable_messages": float(sum(link.num_undecodable for link in links)),
            "resent_messages": float(sum(link.outbox.num_resent for link in links)),
            **self.need.figures(),
        }

    # --- placing ----------------------------------------------------------------------------------------------

    def place(self, request: PlacementRequest, block_hashes: Sequence[bytes], now: float) -> Placement | None:
        self._hear_siblings(now)
        cached, nodes, options = self.tokens_held(block_hashes), self.serving(), self._options
        placement = find_elastic(request, nodes, cached, now, self._rule) if self.is_elastic else None
        if placement is None:
            placement = find_placement(request, nodes, cached, options.local_tail_tokens, self._policy, now)
        if placement is not None:
            self.need.placed(placement.plan)
            placement, counted = with_helpers(placement, request, nodes, options, now)
            for node, told in counted:
                self._count(node, told, now)
        return placement

    def _count(self, view: NodeView, told: Told, now: float) -> None:
        """Notes what this process places, and tells the others."""
        self._note(view, told, now)
        if self._siblings is not None:
            self._siblings.tell(told)

    def _note(self, view: NodeView, told: Told, now: float) -> None:
        ping_sequence = self._links_by_key[view.key].ping_sequence
        view.note_placement(ping_sequence, told.num_tokens, told.num_sequences, now, told.num_new_tokens)
        if view.outlook is not None:
            due_at = now + told.due_ms / 1e3
            view.outlook.note_placement(told.num_tokens, due_at, told.num_streams, now, told.num_stream_tokens)

    def _hear_siblings(self, now: float) -> None:
        for told in self._siblings.news() if self._siblings is not None else ():
            view = self._views_by_tag.get(told.tag)
            if view is not None:
                self._note(view, told, now)

    def expect_sequence(self, view: NodeView, now: float) -> None:
        """Counts a running sequence that is about to come to this node."""
        self._count(view, Told(view.tag, 0, 1, 0, 1, 0), now)

    def offers(self, request: PlacementRequest, block_hashes: Sequence[bytes], now: float) -> list[Choice]:
        """What each node would cost now, cheapest first; nothing is placed."""
        return offers(request, self.serving(), self.tokens_held(block_hashes), now)

    def plans(self, request: PlacementRequest, block_hashes: Sequence[bytes], now: float) -> list[Plan]:
        """What the elastic rule chooses from now, cheapest first; none where it doesn't place."""
        if not self.is_elastic:
            return []
        return plans(request, self.serving(), self.tokens_held(block_hashes), now, self._rule)

    @property
    def has_directory(self) -> bool:
        return self._directory is not None

    def tokens_held(self, block_hashes: Sequence[bytes]) -> dict[NodeKey, int]:
        """How many leading tokens of a prompt each node is known to hold."""
        if self._directory is None or self.model.identity is None or not block_hashes:
            return {}
        return cached_tokens(self._directory, self.serving(), block_hashes, self.model.identity.hash_block_size)

    def send(self, key: NodeKey, message: Verb, now: float) -> bool:
        """Sends a verb to a node. False: that epoch of the node is not connected."""
        link = self._links_by_key.get(key)
        if link is None:
            return False
        link.send(message, now)
        return True

    def _say(self, key: NodeKey, message: LoadAdapter | Adapters | AdaptersKnown) -> bool:
        return self.send(key, message, time.monotonic())

    # --- LinkListener -----------------------------------------------------------------------------------------

    def node_up(self, view: NodeView) -> None:
        link = next(link for link in self._links.values() if link.view is view)
        previous = self._links_by_key.get(view.key)
        if previous is not None and previous is not link:
            logger.warning("%s is the same node as %s; it is not used", link.address, previous.address)
            self._links.pop(link.address).close()
            return
        self._links_by_key[view.key] = link
        self._views_by_tag[view.tag] = view
        self._serving = None
        if not self.serving() and self.model.may_be(view.info):
            self._serve(view.info)
        elif differs := self.model.difference(view.info):
            logger.error("node %s at %s: %s; nothing is sent to it", view.info.node_id, link.address, differs)
        self.model.update([view.info for view in self.serving()])
        self.adapters.node_up(view.key)
        self._listener.on_up(view.key)
        self._listener.on_room()

    def node_status(self, view: NodeView) -> None:
        if view.usable:
            self._listener.on_room()

    def node_lost(self, view: NodeView, reason: str) -> None:
        link = self._links_by_key.get(view.key)
        if link is None or link.view is not None:
            return  # a second address of a node that is still reached through the first
        del self._links_by_key[view.key], self._views_by_tag[view.tag]
        self._serving = None
        self.adapters.node_lost(view.key)
        rest = [view.info for view in self.views if self.model.may_be(view.info)]
        if rest and not self.serving():
            self._serve(rest[0])
        self.model.update([view.info for view in self.serving()])
        self.profiles.lost(view.key)
        self.stories.lost(view.key)
        self._listener.on_lost(view.key, reason)

    def node_message(self, key: NodeKey, message: RequestMessage) -> None:
        link = self._links_by_key.get(key)
        if isinstance(message, RequestFailed) and message.code == "draining" and link is not None and link.view:
            link.view.note_draining()  # its next Status will say so, too
        self._listener.on_message(key, message)

    def node_profiled(self, key: NodeKey, message: Profiled) -> None:
        self.profiles.settle(key, message.ask, message)

    def node_told(self, key: NodeKey, message: Story) -> None:
        self.stories.settle(key, message.ask, (message, time.monotonic()))

    def node_has_adapters(self, key: NodeKey, message: AboutAdapters) -> None:
        self.adapters.on_message(key, message)

    def _serve(self, info: NodeInfo) -> None:
        self.model.serve(info)
        self._serving = None


def cached_tokens(
    directory: DirectoryReader, nodes: Sequence[NodeView], block_hashes: Sequence[bytes], hash_block_size: int
) -> dict[NodeKey, int]:
    """How many leading tokens of a prompt each node holds. A node's blocks may be k times as long as those that are
    hashed: it publishes every k-th hash, so it is looked up by those."""
    size_of = {node.key: node.info.layout.block_size if node.info.layout else hash_block_size for node in nodes}
    found: dict[NodeKey, int] = {}
    for size in set(size_of.values()):
        step = size // hash_block_size
        lengths = directory.longest_prefix(block_hashes if step == 1 else every_kth(block_hashes, step))
        found.update({key: n * size for key, n in lengths.items() if size_of.get(key) == size})
    return found


def _fail(link: NodeLink) -> None:
    try:
        link.fail()
    except Exception:
        repeated.exception("the connection to %s failed, and so did ending it", link.address)
