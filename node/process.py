"""The process around a node's logic: model, pool, transports, threads, signals. The roles' mains wire it.

Threads: step loop (the caller's), I/O (node/control/plane.py), transfer (kv_connector/transfer/thread.py), those of the
transports, and the directory publisher's. They meet in the step loop's inbox.
"""

from __future__ import annotations

import logging
import queue
import secrets
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import zmq
from torch import nn

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.errors import ConfigError, HandshakeError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.model_folder import resolve_model
from tandem.engine.contracts.security import load_cluster_keys
from tandem.engine.contracts.wire.connection import WIRE_VERSION, Hello
from tandem.engine.contracts.wire.operate import TellStory
from tandem.engine.contracts.wire.parts import Message, NodeInfo
from tandem.engine.device.kv_pool import pool_bytes
from tandem.engine.device.saturation import saturated_blocks
from tandem.engine.media.slots import make_media_slots
from tandem.engine.pooling.config import read_pooling_config
from tandem.engine.precision.kv_quality import make_kv_quality
from tandem.engine.process.collector import settle
from tandem.engine.process.launcher_pipe import LauncherPipe
from tandem.engine.process.process_log import start_log
from tandem.engine.process.process_name import name_process
from tandem.engine.process.watched import end_process, end_with_any_thread
from tandem.engine.running.at_start.products import warm_up_tuned
from tandem.engine.running.at_start.step_measure import measure_steps
from tandem.engine.running.graphs.decode_graphs import REPLAYED_TOKENS
from tandem.engine.running.runner import ModelRunner
from tandem.engine.scheduling.core import EngineCore
from tandem.engine.scheduling.ports import NoTiers
from tandem.engine.structured.grammars import Grammars
from tandem.engine.structured.guides import Guides
from tandem.kernels.api.errors import BackendUnavailableError, UnsupportedOptionError
from tandem.kernels.check.compilations import CompilationCounter
from tandem.kv_connector.layouts.plan import check_hello
from tandem.kv_connector.protocol.peer_effects import PeerFailed
from tandem.kv_connector.tiers.jobs import JobDone
from tandem.kv_connector.transfer.layer_hooks import ConnectorWorker
from tandem.kv_connector.transfer.thread import TransferWorker
from tandem.kv_connector.transports.node_transports import NodeTransports
from tandem.node.carry_out import Effects, is_urgent
from tandem.node.context import NodeContext, make_clock
from tandem.node.control.board import LoopBoard
from tandem.node.control.delivery import Delivery
from tandem.node.control.events import ControlEvent, PeerLost
from tandem.node.control.outgoing import Outgoing
from tandem.node.control.plane import ControlPlane
from tandem.node.control.sockets import ControlSockets, advertised
from tandem.node.directory import make_kept, make_kept_once, make_publisher
from tandem.node.drafting.engine import make_drafting
from tandem.node.loop import NodeLoop
from tandem.node.pool import NodePool, allocate_node_pool, transports_of
from tandem.node.precise.engine import make_precise_kv, precise_layout, raises_precision
from tandem.node.profiling.diary import NodeDiary
from tandem.node.profiling.profiler import NodeProfiler, ProfileAsked, ReportMade
from tandem.node.profiling.report import ProfiledNode
from tandem.node.ranks.expert_groups import make_group_steps
from tandem.node.ranks.leader import adapter_source, start_ranks
from tandem.node.report import announce, describe, node_counters
from tandem.node.serving import ServingNode
from tandem.node.setup import (
    block_window,
    has_deadlines,
    load,
    measures_steps,
    size_pool,
    with_device_defaults,
    with_length_that_fits,
)
from tandem.node.tiers import make_tiers, take_copied

# Requests leave no cycles behind, and a collection of everything stops all streams for up to 90 ms.
# The parts of a hand-off's end run on different threads, while the step loop launches kernels for 20 ms on end.
SWITCH_INTERVAL_S = 0.0003  # a guess
logger = logging.getLogger(__name__)


def run_node(options: NodeOptions, make_logic: Callable[[NodeContext], ServingNode]) -> int:
    """Serves until drained by SIGTERM. Returns the exit code: 0, 1 when the node could not start, 2 for a bad
    configuration, 70 when the engine or a thread failed."""
    start_log(options.log_level, options.log_format)
    name_process(options.node_id or options.role)
    end_with_any_thread()
    try:
        folder = resolve_model(options.model.model, options.model.revision)
        if (pooling := read_pooling_config(folder)) is not None:
            from tandem.node.pooling.process import PoolingProcess  # transformers, whose import takes others a second

            return PoolingProcess(options, folder, pooling).serve()
        process = NodeProcess(options, make_logic)
        process.warm_up()
    except (ConfigError, BackendUnavailableError, UnsupportedOptionError) as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 2
    except (OSError, zmq.ZMQError) as error:  # no descriptor or port is left, say: it may go better the next time
        logger.critical("this node can't start: %s", error, exc_info=True)
        return 1
    return process.serve()


class NodeProcess:
    """Everything of one node. The constructor loads and binds, `serve` blocks."""

    def __init__(self, options: NodeOptions, make_logic: Callable[[NodeContext], ServingNode]) -> None:
        self._compilations = CompilationCounter()
        self.launcher = LauncherPipe(options.ready_fd)
        self.keys = load_cluster_keys(options.cluster_secret_file, options.host)
        self.ranks = start_ranks(options)
        on_loaded = self.launcher.loaded if self.launcher.is_open else None
        loaded = load(options, None if self.ranks is None else self.ranks.membership, on_loaded)
        self.options = options = with_device_defaults(options, loaded.device)
        layout, num_precise_blocks = precise_layout(loaded, options)
        num_blocks = size_pool(loaded, options, pool_bytes(layout, num_precise_blocks))
        num_usable = num_blocks - (window := block_window(loaded, options)).num_null_blocks
        self.loaded = with_length_that_fits(loaded, options, num_usable)
        key = NodeKey(options.node_id or f"{options.role}-{secrets.token_hex(3)}", secrets.randbits(64))
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._clock, self._board = make_clock(options.role, has_deadlines(options)), LoopBoard()
        self._diary = NodeDiary(options, key.node_id)

        self.transports = NodeTransports(transports_of(options, self.loaded, self.keys), options.transport)
        self.pool = BlockPool(num_usable, options.cache.enable_prefix_caching, window=window)
        memory = allocate_node_pool(self.loaded, num_blocks, self.transports, self.ranks)
        rate, post, kept = self._clock.prompt_rate, self._inbox.put, make_kept(options, self.pool)
        self.tiers = make_tiers(options, self.pool, memory, self.loaded, rate, post, kept)
        self.kept_once = make_kept_once(self.pool, kept, self.tiers)
        self.transports.register(memory.tensor, memory.layout, key, memory.ranks)

        sockets = ControlSockets(self.keys)
        address = advertised(sockets.bind(options.host, options.port), options.advertise_host)
        exports, num_precise = self.transports.exports(), num_precise_blocks * options.cache.block_size
        self.info = describe(options, self.loaded, memory.layout, key, address, exports, num_precise)
        self._outgoing = Outgoing(sockets.wake, self._diary.sent)
        self.transfer = self._make_transfer(memory)
        self.worker = self._make_worker()
        self.grammars = Grammars(self.loaded.folder, self.loaded.config.vocab_size, self.loaded.config.eos_token_ids)
        adapters = adapter_source(self.loaded.adapters, self.ranks, options.timeouts.load_adapter_s)
        self._delivery = Delivery(self._inbox.put, self.grammars, adapters, self._hear, self._tell)
        num_slots, media_bytes = options.scheduler.max_num_seqs, options.cache.media_cache_bytes
        self.media = make_media_slots(self.loaded.model.media_encoder, num_slots, media_bytes, self.loaded.device)
        self.quality = make_kv_quality(self.loaded.model, options, self.media)
        self.runner = self._make_runner(memory)
        self.together = make_group_steps(self.loaded.model.expert_group, self.runner)
        self.precise = make_precise_kv(self.loaded, options, self.grammars)
        self.drafting = make_drafting(loaded.draft, options, num_blocks, self.runner, self._clock, self.ranks)
        self.control = self._make_control(sockets)
        self.logic = make_logic(self._context())
        self.publisher = make_publisher(options, self.info, num_usable, kept)
        self.profiler = self._make_profiler()
        self.loop = self._make_loop()

    def warm_up(self) -> None:
        """Compiles every kernel and captures every graph that serving needs; on CUDA this takes seconds."""
        if self.loaded.device.type == "cuda":
            torch.cuda.set_device(self.loaded.device)  # another node of this process may have set another
        self.launcher.doing("warming up")
        self.grammars.prepare()
        warm_up_tuned(self.runner, 0.0 if self.ranks else self.options.tune_products_s, self.launcher.doing)
        if self.precise is not None:
            self.precise.runner.warmup()
        if self.tiers is not None:
            self.tiers.warm_up()
        measures = measures_steps(self.options, self.loaded.device)
        if self.drafting is not None:
            self.drafting.warm_up(self.loaded.replays_graphs, measures)
        if self.loaded.replays_graphs:
            self.launcher.doing("capturing graphs")
            self.runner.capture_decode_steps(self.options.prompt_graph_tokens, self.options.prompt_graph_attention)
        if measures:
            state, most = self.logic.scheduler.state, self.options.scheduler.max_num_batched_tokens
            measure_steps(self.runner, min(most, self.runner.max_model_len), state.step_times, state.step_sizes)
        self._compilations.warn_from_now()

    def serve(self) -> int:
        """Serves in a process of its own: sets up signals and garbage collector, prints the ready line, then `run`s.
        When the engine fails the process ends here, whatever thread or device hangs."""
        self.start()
        signal.signal(signal.SIGTERM, lambda *_: self.loop.begin_drain())
        signal.signal(signal.SIGINT, lambda *_: self.loop.begin_drain())
        settle()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        announce(self.info, self.loaded, self.pool, self.options.compile, self.launcher)
        code = self.run()
        if code:
            end_process("the engine failed")
        return code

    def start(self) -> None:
        """Starts the other threads; from here on peers may connect."""
        if self.together is not None:
            self.together.begin(lambda: self._inbox.put(None))
        self.loop.report()
        self.transfer.start()
        self.control.start()

    def run(self) -> int:
        """Runs the step loop on the caller's thread until drained, then closes everything."""
        if self.loaded.device.type == "cuda":
            torch.cuda.set_device(self.loaded.device)  # the current device belongs to a thread
        try:
            self.loop.run()
        except Exception as error:
            logger.exception("the engine failed; this node's epoch ends")
            if self.ranks is not None or self.together is not None:
                end_process(error)  # at once: others' devices may wait for a part of a step that never comes
            self._close()
            return 1
        self._close()
        return 0

    # --- making ---------------------------------------------------------------------------------------------

    def _make_transfer(self, memory: NodePool) -> TransferWorker:
        return TransferWorker(
            memory.tensor,
            memory.layout,
            self.info.key,
            connect=lambda peer, on_lost: self.transports.connect(self.info, peer, on_lost),
            post_event=self._inbox.put,
            send=self._outgoing.send,
            on_peer_lost=lambda *lost: self._inbox.put(PeerFailed(*lost)),
            fault_injection=self.options.fault_injection,
            with_digests=self.options.digests,
            trace=self._diary.trace,
            ranks=memory.ranks,
            on_pushed=self._diary.stories.pushed,
        )

    def _make_worker(self) -> ConnectorWorker:
        layers, group = list(self.loaded.model.attention_layers), self.loaded.layout.group
        return ConnectorWorker(self.transfer, group.places_of(layers), lags=self.ranks is not None)

    def _make_runner(self, memory: NodePool) -> ModelRunner:
        return ModelRunner(
            self.loaded.model,
            memory.own,
            self.options.scheduler,
            self.options.cache.block_size,
            self.loaded.max_model_len,
            self.loaded.config.eos_token_ids,
            self.worker,
            self.ranks,
            Guides(self.grammars),
            self.media,
            self.loaded.adapters,
            raises_precision(self.loaded, self.options),
            self.quality,
            places=self.loaded.layout.group.places,
        )

    def _make_control(self, sockets: ControlSockets) -> ControlPlane:
        return ControlPlane(
            sockets,
            self.info,
            self.options.timeouts,
            self._outgoing,
            self._board,
            deliver=self._deliver,
            check_peer=self._check_peer,
            on_beat=self._beat,
        )

    def _make_loop(self) -> NodeLoop:
        handlers: dict[type, Callable[[Any], None]] = {
            ProfileAsked: self.profiler.on_asked,
            ReportMade: self.profiler.on_made,
        }
        if self.tiers is not None:
            handlers[JobDone] = partial(take_copied, self.tiers.manager, self.logic)
        parts = self.logic.handoffs, self.transports, self.transfer, self.worker
        self._effects = Effects(self.info, *parts, self._outgoing.send, self._inbox.put)
        return NodeLoop(
            self.logic,
            self._make_core(),
            self._inbox,
            self._outgoing,
            self._board,
            self.options.timeouts.drain_s,
            self._after_turn,
            handlers,
            is_urgent,
            self.logic.launch_at,
            self._diary.turn_times,
            self._clock.ends_at,
            self._counters,
            None if self.precise is None else self.precise.core,
            (lambda: True) if self.together is None else self.together.leave,
        )

    def _make_core(self) -> EngineCore:
        find = partial(saturated_blocks, self.runner.pool) if raises_precision(self.loaded, self.options) else None
        return EngineCore(self.logic.scheduler, self.runner, True, find, self.together)

    def _context(self) -> NodeContext:
        return NodeContext(
            self.options,
            self.info,
            self.keys,
            self.pool,
            self.loaded,
            self._clock,
            NoTiers() if self.tiers is None else self.tiers.manager,
            REPLAYED_TOKENS if self.loaded.replays_graphs and self.ranks is None else 0,
            self.transports.is_settled,
            None if self.precise is None else self.precise.scheduler,
            self._diary.stories.chunks,
            None if self.drafting is None else self.drafting.guesser,
        )

    def _make_profiler(self) -> NodeProfiler:
        loaded = self.loaded
        assert isinstance(loaded.model, nn.Module)
        node = ProfiledNode(
            self.info.node_id,
            self.options.role,
            loaded.device,
            loaded.model,
            loaded.model.attention_layers,
            self.pool.num_blocks * loaded.layout.stride_bytes,
            loaded.replays_graphs,
            self.ranks is not None,
            counters=self._counters_now,
            num_steps=lambda: self._diary.turn_times.counters["steps_read"],
            restart_turn=self._diary.turn_times.restart,
        )
        return NodeProfiler(node, self.runner.replay_graphs, self._outgoing.send, self._inbox.put)

    def _counters_now(self) -> dict[str, float]:
        """The counters of the node's newest status, those of its steps up to now."""
        assert self._board.status is not None
        return {**self._board.status.counters, **self._diary.turn_times.counters}

    def _counters(self) -> dict[str, float]:
        return node_counters(
            self._compilations,
            self.transfer.counters,
            self.transports.counters,
            self.control.counters.as_dict(),
            self.runner.counters,
            {} if self.quality is None else self.quality.counters(),
            {} if self.media is None else self.media.outputs.counters,
            {} if self.publisher is None else self.publisher.counters(),
            {} if self.tiers is None else self.tiers.counters(),
            {} if self.kept_once is None else self.kept_once.counters(),
            self._diary.turn_times.counters,
            {} if self.loaded.adapters is None else self.loaded.adapters.store.counters(),
        )

    def _check_peer(self, info: NodeInfo) -> None:
        check_hello(self.info, Hello(wire_version=WIRE_VERSION, info=info))
        if info.node_id == self.info.node_id:
            raise HandshakeError("node_id", self.info.node_id, info.node_id)
        self.transports.check_peer(self.info, info)

    # --- running --------------------------------------------------------------------------------------------

    def _hear(self, message: Message) -> None:
        self._diary.received(message)
        self.transfer.hear(message)

    def _deliver(self, event: ControlEvent) -> None:
        if isinstance(event, PeerLost):  # the step loop may be in a step that waits for this peer
            self.transfer.arrivals.source_lost(event.info.key)
        self._delivery.deliver(event)

    def _beat(self) -> None:
        self.launcher.beat()
        self.transfer.arrivals.expire(time.monotonic())

    def _tell(self, router: NodeKey, asked: TellStory) -> None:
        self._outgoing.send(router, self._diary.stories.tell(asked))

    def _after_turn(self) -> None:
        self._effects.apply()
        if self.profiler.is_on:
            self.profiler.after_turn()
        events = self.pool.drain_events()
        if self.tiers is not None:
            events += self.tiers.after_turn(events, is_idle=not self.logic.scheduler.state.has_work())
        if self.kept_once is not None:
            events += self.kept_once.on_turn(events)
        if events and self.publisher is not None:
            self.publisher.publish(events)

    def _close(self) -> None:
        """Closes everything, within bounds: what can't be closed in time dies with the process."""
        try:
            if self.publisher is not None:
                self.publisher.close()
            self.control.stop()
            self._delivery.close()
            self.transfer.stop(2.0)
            self._diary.close()
            for part in (self.tiers, self.transports, self.together, self.ranks):
                if part is not None:
                    part.close()
        except Exception:  # of whatever kind: the process must end all the same
            logger.exception("closing failed")
