"""The adapters that clients may name, as one router process knows them. On the event loop.

What `--lora-modules` lists is each router's own; what was loaded and unloaded since is known to all routers through the
nodes (`AdapterTable`), and goes before it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from tandem.engine.contracts.config import LoraOptions
from tandem.engine.contracts.errors import AdapterError, ConfigError, ModelNotFoundError, UnavailableError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.adapter_table import AdapterTable, ref_of
from tandem.engine.contracts.wire.adapters import (
    AdapterEntry,
    AdapterLoaded,
    Adapters,
    AdaptersKnown,
    LoadAdapter,
)
from tandem.engine.contracts.wire.parts import AdapterRef
from tandem.router.nodes.answers import NodeAnswers

logger = logging.getLogger(__name__)

SPREAD_S = 5.0  # a guess: how long a change waits for every router to know of it; all learn it later, too
LISTED = 0  # the stamp of questions about what --lora-modules lists


def parse_modules(options: LoraOptions) -> dict[str, str]:
    """NAME=FOLDER of each module -> folders by name. Raises ConfigError for what is none, and where adapters aren't
    served."""
    folders: dict[str, str] = {}
    if options.lora_modules and not options.enable_lora:
        raise ConfigError("--lora-modules lists adapters, which are served with --enable-lora alone")
    for module in options.lora_modules:
        name, equals, path = module.partition("=")
        if not equals or not name or not path:
            raise ConfigError(f"--lora-modules {module!r}: it must be NAME=FOLDER")
        if name in folders:
            raise ConfigError(f"--lora-modules names {name!r} twice")
        folders[name] = path
    return folders


class ServedAdapters:
    """The adapters that clients may name. `tell` sends a node a message; False: it is not connected. `nodes` are those
    that are."""

    def __init__(
        self,
        options: LoraOptions,
        tell: Callable[[NodeKey, LoadAdapter | Adapters | AdaptersKnown], bool],
        nodes: Callable[[], Sequence[NodeKey]],
    ) -> None:
        self._listed = parse_modules(options)
        self.is_enabled, self._tell, self._nodes = options.enable_lora, tell, nodes
        self._digests: dict[str, bytes] = {}  # of listed folders, by path, as the first node read them
        self._problems: dict[str, str] = {}  # why a listed folder can't be served, by path
        self._table = AdapterTable()
        self._loaded: NodeAnswers[AdapterLoaded] = NodeAnswers()  # by stamp
        self._known: NodeAnswers[AdaptersKnown] = NodeAnswers()  # by the number of the change
        self._num_changes = 0
        self._greeted: dict[int, NodeKey] = {}  # who was asked what it knows of names, by number
        self._has_heard = False  # whether any has answered

    # --- what is there ----------------------------------------------------------------------------------------

    def is_unread(self, name: str) -> bool:
        """Whether `name` is a listed adapter of which no node has said yet what it holds, or may be a loaded one of
        which no node has told yet: of several processes on one port one may be late."""
        if self._table.find(name) is not None:
            return False
        path = self._listed.get(name)
        if path is None:
            return self.is_enabled and not self._has_heard
        return path not in (*self._digests, *self._problems)

    def find(self, name: str) -> AdapterRef | None:
        """The adapter of that name; None: there is none. Raises UnavailableError for one that no node has read yet, and
        AdapterError for a listed one that can't be served."""
        entry = self._table.find(name)
        if entry is not None:
            return ref_of(entry)
        path = self._listed.get(name)
        if path is None:
            return None
        if path in self._digests:
            return AdapterRef(path, self._digests[path])
        if path in self._problems:
            raise AdapterError(f"the adapter {name!r} can't be served: {self._problems[path]}", param="model")
        raise UnavailableError(f"no node has read the adapter {name!r} yet")

    def all(self) -> dict[str, str]:
        """Folders by name."""
        found = {name: path for name, path in self._listed.items() if self._table.find(name) is None}
        found |= {entry.name: entry.path for entry in self._table.entries if entry.path}
        return found

    # --- changes ----------------------------------------------------------------------------------------------

    async def load(self, name: str, path: str, nodes: Sequence[NodeKey], within_s: float) -> None:
        """Serves the adapter in the folder `path`, as nodes see it, by that name, once all `nodes` have it. When it
        returns, every router serves it, or was silent for SPREAD_S. Raises
        AdapterError that says which node can't have it, and why; UnavailableError when some haven't answered."""
        if not nodes:
            raise UnavailableError("no node is connected yet")
        stamp = self._table.next_stamp(name, time.time_ns())
        question = LoadAdapter(path=path, stamp=stamp)
        answers = await self._loaded.gather(nodes, stamp, lambda node: self._tell(node, question), within_s)
        if silent := sorted(node.node_id for node in nodes if node not in answers):
            raise UnavailableError(f"{', '.join(silent)} did not answer; {name!r} is not served")
        known = {node: answer for node, answer in answers.items() if answer is not None}
        await self._learn(AdapterEntry(name, stamp, path, _agreed(name, known)))

    async def unload(self, name: str) -> None:
        """Stops serving the adapter called `name`; requests that run with it finish. When this returns, no router
        serves it, or some were silent for SPREAD_S. Raises ModelNotFoundError."""
        if name not in self.all():
            raise ModelNotFoundError(f"no adapter is called {name[:200]!r}", param="lora_name")
        await self._learn(AdapterEntry(name, self._table.next_stamp(name, time.time_ns())))

    async def _learn(self, entry: AdapterEntry) -> None:
        """Tells all routers of a change by way of the nodes. Of several processes on one port any may take the client's
        next request, so whoever asked for the change is answered when all of them know."""
        self._table.merge([entry])
        self._num_changes += 1
        told, nodes = Adapters(entries=self._table.entries, ask=self._num_changes), self._nodes()
        if not nodes:
            return
        known = await self._known.gather(nodes, told.ask, lambda node: self._tell(node, told), SPREAD_S)
        if silent := sorted(node.node_id for node in nodes if node not in known):
            logger.warning("routers of %s may not know yet what %r is", ", ".join(silent), entry.name)

    # --- what nodes say -----------------------------------------------------------------------------------------

    def node_up(self, node: NodeKey) -> None:
        if not self.is_enabled:
            return
        self._num_changes += 1
        self._greeted[self._num_changes] = node
        self._tell(node, Adapters(entries=self._table.entries, ask=self._num_changes))
        for path in dict.fromkeys(self._listed.values()):
            self._tell(node, LoadAdapter(path=path, stamp=LISTED))

    def node_lost(self, node: NodeKey) -> None:
        self._loaded.lost(node)
        self._known.lost(node)
        self._greeted = {number: other for number, other in self._greeted.items() if other != node}

    def on_message(self, node: NodeKey, message: AdapterLoaded | Adapters | AdaptersKnown) -> None:
        if isinstance(message, AdapterLoaded):
            self._on_loaded(node, message)
        elif isinstance(message, AdaptersKnown):
            self._has_heard |= self._greeted.pop(message.ask, None) is not None
            self._known.settle(node, message.ask, message)
        else:
            self._table.merge(message.entries)
            if message.ask:
                self._tell(node, AdaptersKnown(ask=message.ask))

    def _on_loaded(self, node: NodeKey, message: AdapterLoaded) -> None:
        if self._loaded.settle(node, message.stamp, message):
            return
        if message.stamp == LISTED and message.problem:
            logger.error("%s can't serve a listed adapter: %s", node.node_id, message.problem)
            self._problems[message.path] = message.problem
        elif message.stamp == LISTED and self._digests.setdefault(message.path, message.digest) != message.digest:
            logger.error(
                "%s has another adapter in %s than other nodes and refuses what is for it", *_named(node, message)
            )


def _named(node: NodeKey, message: AdapterLoaded) -> tuple[str, str]:
    return node.node_id, message.path


def _agreed(name: str, answers: dict[NodeKey, AdapterLoaded]) -> bytes:
    """The digest on which all answers agree. Raises AdapterError, or UnavailableError when there are none."""
    problems = [f"{node.node_id}: {answer.problem}" for node, answer in sorted(answers.items()) if answer.problem]
    if problems:
        most = f" ({len(answers) - len(problems)} of {len(answers)} nodes have it)" if len(answers) > 1 else ""
        raise AdapterError(f"{name!r} is not served{most}; {'; '.join(problems)}", param="lora_path")
    digests = {answer.digest for answer in answers.values()}
    if len(digests) > 1:
        raise AdapterError(f"{name!r} is not served: nodes hold different files in this folder", param="lora_path")
    if not digests:
        raise UnavailableError(f"{name!r} is not served: every node was lost meanwhile")
    return digests.pop()
