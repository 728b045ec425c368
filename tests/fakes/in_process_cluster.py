"""Real nodes in one process (threads instead of processes), and a client that talks to them as a router does."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import zmq
from waiting import PATIENCE_S, wait_until

from tandem.decode_node.main import make_logic as make_decode
from tandem.engine.contracts.config import CacheOptions, ModelOptions, NodeOptions, SchedulerOptions, Timeouts
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire import codec
from tandem.engine.contracts.wire.connection import WIRE_VERSION, Hello, Ping, Refused, Status, Welcome
from tandem.engine.contracts.wire.media import MediaItem
from tandem.engine.contracts.wire.parts import NO_TARGETS, AdapterRef, Message, NodeInfo, PeerRef, PrefixHint, Targets
from tandem.engine.contracts.wire.requests import (
    Accepted,
    Cancel,
    Cancelled,
    Migrate,
    Migrated,
    PromptLogprobs,
    RequestFailed,
    Submit,
    Tokens,
)
from tandem.engine.scheduling.step import SchedulerOutput
from tandem.node.process import NodeProcess
from tandem.prefill_node.main import make_logic as make_prefill

BLOCK = 16
SEND_S = PATIENCE_S  # for which a message waits for room: nothing makes any once its node has ended
# What tests wait for comes soon; nobody is given up for being slow on a busy machine.
FAST = Timeouts(heartbeat_s=0.1, peer_lost_s=PATIENCE_S, connect_s=20.0, resend_s=0.2, drain_s=PATIENCE_S, pull_s=20.0)


def node_options(role: str, model: Path, **changes: object) -> NodeOptions:
    """A small CPU node; beside NodeOptions' fields `block_size`, `num_blocks`, `caching`, `chunk`, `max_num_seqs`,
    `ttft_target_ms`, `tpot_target_ms`, `speculative_config`, `keep_kv_once`, `kv_cache_dtype`, `kv_scales`,
    `calculate_kv_scales`, `precise_kv_tokens` and `kv_quality_sample_rate`."""
    cache = CacheOptions(
        block_size=int(changes.pop("block_size", BLOCK)),  # type: ignore[call-overload]
        hash_block_size=BLOCK,
        num_blocks=int(changes.pop("num_blocks", 256)),  # type: ignore[call-overload]
        enable_prefix_caching=bool(changes.pop("caching", True)),
        host_tier_bytes=int(changes.pop("host_tier_bytes", 4 << 20)),  # type: ignore[call-overload]
        host_tier_dtype=changes.pop("host_tier_dtype", "auto"),  # type: ignore[arg-type]
        disk_tier_bytes=int(changes.pop("disk_tier_bytes", 0)),  # type: ignore[call-overload]
        disk_tier_dir=str(changes.pop("disk_tier_dir", "")),
        hybrid_kv=bool(changes.pop("hybrid_kv", True)),
        keep_kv_once=bool(changes.pop("keep_kv_once", False)),
        kv_cache_dtype=changes.pop("kv_cache_dtype", "auto"),  # type: ignore[arg-type]
        kv_scales=str(changes.pop("kv_scales", "")),
        calculate_kv_scales=bool(changes.pop("calculate_kv_scales", False)),
        precise_kv_tokens=int(changes.pop("precise_kv_tokens", 0)),  # type: ignore[call-overload]
        kv_quality_sample_rate=float(changes.pop("kv_quality_sample_rate", 0)),  # type: ignore[arg-type]
    )
    scheduler = SchedulerOptions(
        max_num_seqs=int(changes.pop("max_num_seqs", 16)),  # type: ignore[call-overload]
        max_num_batched_tokens=1024,
        max_prefill_chunk=int(changes.pop("chunk", 0)),  # type: ignore[call-overload]
        ttft_target_ms=int(changes.pop("ttft_target_ms", 300)),  # type: ignore[call-overload]
        tpot_target_ms=float(changes.pop("tpot_target_ms", 0)),  # type: ignore[arg-type]
        speculative_config=str(changes.pop("speculative_config", "")),
    )
    options = {"timeouts": FAST, "num_threads": 1, **changes}
    return NodeOptions(role=role, model=ModelOptions(str(model)), cache=cache, scheduler=scheduler, **options)  # type: ignore[arg-type]


class Node:
    """One node on threads. `process` gives access to pool, scheduler and managers."""

    def __init__(self, options: NodeOptions) -> None:
        self.process = NodeProcess(options, make_prefill if options.role == "prefill" else make_decode)
        if self.process.loaded.device.type == "cuda":
            self.process.warm_up()
        self.process.start()
        self._thread = threading.Thread(target=self.process.run, daemon=True)
        self._thread.start()

    @property
    def info(self) -> NodeInfo:
        return self.process.info

    def stop(self) -> None:
        """Drains and ends the node; asserts that it came to an end and holds nothing."""
        self.process.loop.begin_drain()
        self.wait_until_over()
        self.process.logic.check_integrity()
        assert not self.process.logic.scheduler.state.num_faults, "a request was given up for an error of ours"

    def wait_until_over(self) -> None:
        self._thread.join(2 * PATIENCE_S)
        assert not self._thread.is_alive(), "the node did not end"

    def hold_after(self, num_steps: int) -> None:
        """It takes so many more steps; then, until `go_on`, it hears, answers and moves KV but computes nothing."""
        scheduler, left = self.process.logic.scheduler, num_steps
        schedule = type(scheduler).schedule

        def counted() -> SchedulerOutput | None:
            nonlocal left
            output = schedule(scheduler) if left > 0 else None
            left -= output is not None
            return output

        scheduler.schedule = counted

    def go_on(self) -> None:
        del self.process.logic.scheduler.schedule

    @contextmanager
    def holding_until_accepted(self, client: Client) -> Iterator[None]:
        """It computes nothing before all that `client` asks within the context is here: all of it runs at once."""
        self.hold_after(0)
        try:
            yield
            client.until(lambda: all(result.accepted or result.failed for result in client.results.values()))
        finally:
            self.go_on()

    def cached_hashes(self) -> list[bytes]:
        """Of its pool, by a thread that the step loop doesn't wait for: what it meanwhile changes is read anew."""
        while True:
            with suppress(RuntimeError):
                return self.process.pool.cached_hashes()

    def wait_until_whole(self) -> None:
        pool = self.process.pool
        wait_until(lambda: pool.num_free == pool.num_blocks, "every block to be free again")


@dataclass
class Result:
    tokens: dict[int, dict[int, int]] = field(default_factory=dict)  # sample -> output_index -> token
    num_deltas: int = 0
    finished: dict[int, str] = field(default_factory=dict)
    failed: RequestFailed | None = None
    cancelled: bool = False
    accepted: int = 0
    num_cached_tokens: int = 0  # when it was accepted
    num_reused_tokens: int = 0  # when its prompt was computed, as clients are told
    prompt_logprobs: tuple = ()
    logprobs: dict[int, list] = field(default_factory=dict)
    cumulative_logprobs: dict[int, float] = field(default_factory=dict)  # of samples that are beams
    num_samples: int = 1
    num_prior: int = 0  # of a sequence that moved: the client's tokens when it was told to
    migrated: list[Migrated] = field(default_factory=list)
    first_index: int | None = None  # of the token that another node sends than all after it, perhaps after them

    @property
    def done(self) -> bool:
        if self.failed is not None or self.cancelled:
            return True
        has_first = all(self.first_index in (None, *self.tokens.get(sample, ())) for sample in self.finished)
        return len(self.finished) == self.num_samples and has_first

    def output(self, sample: int = 0) -> list[int]:
        """Tokens in order; asserts that none is missing."""
        tokens = self.tokens.get(sample, {})
        first = min(tokens, default=0)
        assert sorted(tokens) == list(range(first, first + len(tokens))), f"a token is missing: {sorted(tokens)}"
        return [tokens[index] for index in sorted(tokens)]


def _ref(node: NodeInfo) -> PeerRef:
    return PeerRef(node.node_id, node.epoch, node.control_address)


class Client:
    """What a router says to nodes, without HTTP.

    Messages are taken in when a test polls. Heartbeats go on meanwhile, from a thread: nodes forget a router that is
    silent, and a test may be busy with something else for long, such as its reference.
    """

    def __init__(self, *nodes: NodeInfo) -> None:
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket] = {}
        self.results: dict[tuple[str, int], Result] = {}
        self.statuses: dict[str, Status] = {}
        self._ping_at = 0.0
        self._turn = threading.Lock()  # threads may share a ZMQ socket if they take turns
        self._closing = threading.Event()
        info = NodeInfo(node_id=f"router-{secrets.token_hex(3)}", epoch=secrets.randbits(64), role="router")
        for node in nodes:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, info.node_id.encode())
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDTIMEO, int(SEND_S * 1000))
            socket.setsockopt(zmq.RCVHWM, 0)  # nothing is lost while nobody polls
            socket.connect(node.control_address)
            self._sockets[node.node_id] = socket
            self.send(node, Hello(wire_version=WIRE_VERSION, info=info))
            assert isinstance(self._receive(socket), Welcome)
        self._heart = threading.Thread(target=self._beat_on, daemon=True)
        self._heart.start()

    def send(self, node: NodeInfo, message: Message) -> None:
        """Raises zmq.Again where the node has taken nothing for long."""
        with self._turn:
            self._sockets[node.node_id].send(codec.encode(message))

    def _beat_on(self) -> None:
        while not self._closing.wait(FAST.heartbeat_s / 2):
            with self._turn:
                self._beat()

    def _beat(self) -> None:
        """If it is time: the answers would keep everybody busy."""
        if time.monotonic() >= self._ping_at:
            self._ping_at = time.monotonic() + FAST.heartbeat_s / 2
            for socket in self._sockets.values():
                with suppress(zmq.Again):  # as many as find room are on their way to it
                    socket.send(codec.encode(Ping(sequence=1)), zmq.NOBLOCK)

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        decode: NodeInfo,
        prefill: NodeInfo | None = None,
        samples: tuple[int, ...] = (0,),
        attempt: int = 0,
        num_prior: int = 0,
        priority: int = 0,
        deadline_s: float = 2 * PATIENCE_S,
        holder: NodeInfo | None = None,
        num_held: int = 0,
        helpers: Sequence[NodeInfo] = (),
        salt: bytes = b"",
        cache_share: float = 1.0,
        media: tuple[MediaItem, ...] = (),
        targets: Targets = NO_TARGETS,
        is_precise: bool = False,
        adapter: AdapterRef | None = None,
    ) -> Result:
        """With `prefill` split over two nodes, else on `decode` alone. `holder`: whom to pull its prefix from, of which
        it is said to have `num_held` tokens (0: all). `helpers`: who may compute its beginning."""
        result = self.results[request_id, attempt] = Result(
            num_samples=len(samples), first_index=None if prefill is None or sampling.beam_width else num_prior
        )

        def message(mode: str, peer: NodeInfo | None) -> Submit:
            return Submit(
                request_id=request_id,
                attempt=attempt,
                mode=mode,  # type: ignore[arg-type]
                prompt_token_ids=np.asarray(prompt, "<i4").tobytes(),
                num_prior_output_tokens=num_prior,
                sample_indices=samples,
                sampling=sampling,
                priority=priority,
                deadline_s=deadline_s,
                peer=None if peer is None else _ref(peer),
                prefix=None if holder is None else PrefixHint(_ref(holder), num_held or len(prompt)),
                helpers=() if mode == "decode" else tuple(map(_ref, helpers)),
                salt=salt,
                cache_share=cache_share,
                media=media,
                targets=targets,
                is_precise=is_precise,
                adapter=adapter,
                context=b"" if adapter is None else adapter.digest,
            )

        if prefill is None:
            self.send(decode, message("full", None))
        else:
            self.send(decode, message("decode", prefill))
            self.send(prefill, message("prefill", decode))
        return result

    def key_of(self, result: Result) -> tuple[str, int]:
        return next(key for key, known in self.results.items() if known is result)

    def until(self, condition: Callable[[], bool]) -> None:
        """Polls meanwhile."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "it did not happen"
            self.poll(0.005)

    def migrate(
        self,
        result: Result,
        sample: int,
        prompt: Sequence[int],
        sampling: SamplingParams,
        here: NodeInfo,
        to: NodeInfo,
        prior: Sequence[int] = (),
        media: tuple[MediaItem, ...] = (),
    ) -> Result:
        """Hands a sample that decodes `here` to another node, as attempt 10 (+1 for each before) of a request of its
        own; returns what comes from there. `prior`: output from before `result`."""
        request_id, attempt = self.key_of(result)
        successor = (f"{request_id}-s{sample}" if "-s" not in request_id else request_id, max(10, attempt + 1))
        seen = [*prior, *result.output(sample)]
        known = [*prompt, *seen]
        moved = self.results[successor] = Result(num_prior=len(seen))
        submit = Submit(
            request_id=successor[0],
            attempt=successor[1],
            mode="decode",
            prompt_token_ids=np.asarray(known, "<i4").tobytes(),
            num_prior_output_tokens=len(seen),
            sample_indices=(sample,),
            sampling=sampling,
            peer=_ref(here),
            is_running=True,
            media=media,
        )
        self.send(to, submit)
        order = Migrate(
            request_id=request_id,
            attempt=attempt,
            sample_index=sample,
            peer=_ref(to),
            successor=successor,
            num_tokens=len(known),
            deadline_s=PATIENCE_S,
        )
        self.send(here, order)
        return moved

    def cancel(self, request_id: str, attempt: int, *nodes: NodeInfo) -> None:
        for node in nodes:
            self.send(node, Cancel(request_id=request_id, attempt=attempt))

    def wait(self, *results: Result) -> None:
        """Reads until each of `results` (default: all) has ended."""
        deadline = time.monotonic() + 2 * PATIENCE_S
        pending = list(results or self.results.values())
        while any(not result.done for result in pending):
            assert time.monotonic() < deadline, "a request did not end"
            self.poll(0.05)

    def poll(self, timeout_s: float) -> None:
        poller = zmq.Poller()
        with self._turn:
            for socket in self._sockets.values():
                poller.register(socket, zmq.POLLIN)
            for socket, _ in poller.poll(int(timeout_s * 1000)):
                while socket.poll(0):
                    self._take(codec.decode_from_node(socket.recv()))
            self._beat()  # as well: who polls all the time leaves the thread no turn

    def close(self) -> None:
        self._closing.set()
        self._heart.join()
        for socket in self._sockets.values():
            socket.close()
        self._context.term()

    @staticmethod
    def _receive(socket: zmq.Socket) -> Message:
        assert socket.poll(int(PATIENCE_S * 1000)), "the node does not answer"
        return codec.decode_from_node(socket.recv())

    def _take(self, message: Message) -> None:
        if isinstance(message, Tokens):
            for delta in message.deltas:
                result = self.results[delta.request_id, delta.attempt]
                result.num_deltas += 1
                result.num_reused_tokens = max(result.num_reused_tokens, delta.num_cached_tokens)
                tokens = result.tokens.setdefault(delta.sample_index, {})
                for offset, token in enumerate(delta.token_ids):
                    assert delta.output_index + offset not in tokens, "a token came twice"
                    tokens[delta.output_index + offset] = token
                if delta.finish_reason is not None:
                    result.finished[delta.sample_index] = delta.finish_reason
                if delta.cumulative_logprob is not None:
                    result.cumulative_logprobs[delta.sample_index] = delta.cumulative_logprob
                if delta.logprobs is not None:
                    result.logprobs.setdefault(delta.sample_index, []).extend(delta.logprobs)
        elif isinstance(message, RequestFailed):
            self.results[message.request_id, message.attempt].failed = message
        elif isinstance(message, Accepted):
            result = self.results[message.request_id, message.attempt]
            result.accepted += 1
            result.num_cached_tokens = max(result.num_cached_tokens, message.num_cached_tokens)
        elif isinstance(message, PromptLogprobs):
            self.results[message.request_id, message.attempt].prompt_logprobs = message.entries
        elif isinstance(message, Migrated):
            self.results[message.request_id, message.attempt].migrated.append(message)
        elif isinstance(message, Cancelled):
            self.results[message.request_id, message.attempt].cancelled = True
        elif isinstance(message, Status):
            self.statuses[message.node_id] = message
        elif isinstance(message, Refused):
            raise AssertionError(f"a node has forgotten this client: {message}")


def cuda_pair(folder: Path, dtype: str = "bfloat16", **changes: object) -> list[Node]:
    """A decode node and a prefill node on CUDA."""
    nodes = []
    for role in ("decode", "prefill"):
        options = node_options(role, folder, device="cuda", num_blocks=256, transport="local", **changes)
        fields = {**vars(options), "model": ModelOptions(str(folder), dtype=dtype)}
        nodes.append(Node(type(options)(**fields)))
    return nodes


@contextmanager
def client_of(nodes: Sequence[Node]) -> Iterator[Client]:
    """A client of running nodes, which are whole at the end."""
    client = Client(*(node.info for node in nodes))
    with whole_at_the_end(nodes, client):
        yield client


@contextmanager
def whole_at_the_end(nodes: Sequence[Node], client: Client) -> Iterator[None]:
    """At the end each must be whole again; they and their client are stopped, whatever came of it."""
    try:
        yield
        for node in nodes:
            node.wait_until_whole()
    finally:
        client.close()
        for node in reversed(nodes):
            node.stop()
