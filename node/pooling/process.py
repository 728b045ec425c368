"""The process around a pooling node: its model, control plane, directory record and loop."""

from __future__ import annotations

import logging
import os
import queue
import secrets
import signal
import time
from dataclasses import replace
from pathlib import Path

import torch

from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.errors import ConfigError, HandshakeError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.kv_layout import ModelIdentity
from tandem.engine.contracts.model_folder import served_name
from tandem.engine.contracts.security import load_cluster_keys
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.engine.models.identity import pooling_identity
from tandem.engine.pooling.config import PoolingConfig
from tandem.engine.pooling.model import PoolingModel
from tandem.engine.process.collector import settle
from tandem.engine.process.launcher_pipe import LauncherPipe
from tandem.engine.process.version import version
from tandem.engine.process.watched import end_process
from tandem.kv_connector.transports.mapped.processes import host_id
from tandem.node.control.board import LoopBoard
from tandem.node.control.events import PeerLost, PeerRefused, PeerUp, Received
from tandem.node.control.outgoing import Outgoing
from tandem.node.control.plane import ControlPlane
from tandem.node.control.sockets import ControlSockets, advertised
from tandem.node.directory import make_publisher
from tandem.node.loop import IDLE_WAIT_S, STATUS_EVERY_S
from tandem.node.pooling.logic import PoolingNode
from tandem.node.requests import RequestBook
from tandem.node.setup import choose_device, with_device_defaults

logger = logging.getLogger(__name__)


class PoolingProcess:
    """Everything of one node, whichever role it was started with: nothing is handed over, so routers give each whole
    requests, as to a single node. The constructor loads and binds, raising ConfigError; `serve` blocks."""

    def __init__(self, options: NodeOptions, folder: Path, config: PoolingConfig) -> None:
        _check_options(options)
        self._launcher = LauncherPipe(options.ready_fd)
        keys = load_cluster_keys(options.cluster_secret_file, options.host)
        device = choose_device(options)
        self._options = options = with_device_defaults(options, device)
        dtype = _choose_dtype(options.model.dtype, device)
        max_model_len = options.model.max_model_len or config.max_model_len
        if max_model_len > config.max_model_len:
            raise ConfigError(f"--max-model-len {max_model_len} is beyond the model's {config.max_model_len}")
        self._device, self._dtype = device, dtype
        self._launcher.doing("loading weights")
        model = PoolingModel(folder, config, device, dtype)
        key = NodeKey(options.node_id or f"{options.role}-{secrets.token_hex(3)}", secrets.randbits(64))
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._board = LoopBoard()
        sockets = ControlSockets(keys)
        address = advertised(sockets.bind(options.host, options.port), options.advertise_host)
        identity = pooling_identity(folder, config, options.cache.hash_block_size, str(dtype))
        self.info = _describe(options, config, key, address, identity, max_model_len)
        book = RequestBook(self.info.vocab_size, self.info.max_model_len)
        scheduler = options.scheduler
        batch = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        self.logic = PoolingNode(key, book, model.run, *batch, scheduler.max_queue)
        self._outgoing = Outgoing(sockets.wake)
        self._control = ControlPlane(
            sockets,
            self.info,
            options.timeouts,
            self._outgoing,
            self._board,
            deliver=self._inbox.put,
            check_peer=_refuse,
            on_beat=self._launcher.beat,
        )
        self._publisher = make_publisher(replace(options, role="unified"), self.info, 0)

    def serve(self) -> int:
        """Serves in a process of its own: sets up signals, prints the ready line, then `run`s. Returns the exit
        code."""
        self.start()
        signal.signal(signal.SIGTERM, lambda *_: self.begin_drain())
        signal.signal(signal.SIGINT, lambda *_: self.begin_drain())
        settle()
        info = self.info
        logger.info("%s serves %s (%s) at %s", info.node_id, info.model_name, info.task, info.control_address)
        self._launcher.ready(
            node_id=info.node_id,
            address=info.control_address,
            pid=info.pid,
            device=str(self._device),
            dtype=str(self._dtype).removeprefix("torch."),
            max_model_len=info.max_model_len - 1,
        )
        try:
            self.run()
        except Exception:
            logger.exception("the engine failed; this node's epoch ends")
            end_process("the engine failed")
        return 0

    def start(self) -> None:
        """Starts the other threads; from here on routers may connect."""
        self._board.show(self.logic.status())
        self._control.start()

    def begin_drain(self) -> None:
        """Makes the node take nothing new, finish what is here, then return from `run`. After a second call `run`
        returns at once."""
        self._inbox.put("drain")

    def run(self) -> None:
        """Runs the loop on the caller's thread until drained, then closes everything."""
        drain_deadline: float | None = None
        next_status, is_busy, is_stopping = 0.0, False, False
        while not is_stopping:
            self._board.turn_begins()
            for event in self._events(0.0 if is_busy else IDLE_WAIT_S):
                if isinstance(event, Received | PeerUp | PeerLost | PeerRefused):
                    self.logic.on_control(event, time.monotonic())
                elif event == "drain":
                    is_stopping = drain_deadline is not None
                    drain_deadline, next_status = time.monotonic() + self._options.timeouts.drain_s, 0.0
                    self.logic.drain()
            self.logic.on_tick(time.monotonic())
            is_busy = self.logic.step()
            for to, message in self.logic.drain_outbox():
                self._outgoing.send(to, message)
            now = time.monotonic()
            if now >= next_status:
                next_status = now + STATUS_EVERY_S
                self._board.show(self.logic.status())
            is_stopping |= drain_deadline is not None and (self.logic.is_empty or now > drain_deadline)
        if self._publisher is not None:
            self._publisher.close()
        self._control.stop()

    def _events(self, wait_s: float) -> list[object]:
        found: list[object] = []
        try:
            found.append(self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait())
            while True:
                found.append(self._inbox.get_nowait())
        except queue.Empty:
            return found


def _check_options(options: NodeOptions) -> None:
    """Raises ConfigError for options that would do nothing for such a model."""
    refused = {
        "--tensor-parallel-size": options.tensor_parallel_size > 1,
        "--load-format dummy": options.model.load_format == "dummy",
        "--compile": options.compile,
        "--leaning (and --no-fixed-roles, which gives it)": bool(options.leaning),
    }
    for option, is_given in refused.items():
        if is_given:
            raise ConfigError(
                f"{option} is not for a model that pools, which runs as it is, on one device, with its own weights, "
                "and has neither prompts nor streams to be for first: leave it out"
            )


def _choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _describe(
    options: NodeOptions,
    config: PoolingConfig,
    key: NodeKey,
    address: str,
    identity: ModelIdentity,
    max_model_len: int,
) -> NodeInfo:
    return NodeInfo(
        node_id=key.node_id,
        epoch=key.epoch,
        role="unified",
        control_address=address,
        host_id=host_id(),
        pid=os.getpid(),
        version=version(),
        identity=identity,
        model_name=served_name(options.model.model, options.model.served_name),
        max_model_len=max_model_len + 1,  # a place for the output token that each request is counted with
        vocab_size=config.vocab_size,
        task=config.task,
        embedding_sizes=config.embedding_sizes,
    )


def _refuse(info: NodeInfo) -> None:
    raise HandshakeError("task", "a model without KV to hand over", info.node_id)
