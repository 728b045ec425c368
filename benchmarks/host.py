"""CPU time of a node's pipelined decode step, by part, with a device that computes nothing. No GPU.

    python benchmarks/host.py [--rows 1,64,256] [--steps 400] [--drafts 3 --chance 0.6]

Times are the step-loop thread's own CPU microseconds a step (medians). `floor` is what the wire alone asks for: making
and encoding one token delta a row; `ratio` is the whole step over it, the figure to compare between machines. The last
columns are the I/O thread's CPU time a step with real sockets, and the share of it that the step loop can feel: CPU
seconds of the step-loop thread beyond those it needs when nobody listens.

With `--drafts` each sequence looks up so many drafts, each of which is right with that chance; a step is then read
before the next is decided, and takes so much virtual time that drafts always pay.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event

import numpy as np
import torch
import zmq

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import ModelOptions, NodeOptions, SchedulerOptions, Timeouts
from tandem.engine.contracts.hashing import root_hash
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.rate import Rate
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.security import load_cluster_keys
from tandem.engine.contracts.wire import codec
from tandem.engine.contracts.wire.connection import WIRE_VERSION, Hello, Status, Welcome
from tandem.engine.contracts.wire.parts import Message, NodeInfo
from tandem.engine.contracts.wire.requests import Submit, TokenDelta, Tokens
from tandem.engine.running.batch_state import BatchState
from tandem.engine.running.graphs.decode_batch import DecodeBatch
from tandem.engine.scheduling.books import SchedulerState
from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.ports import NoTiers
from tandem.engine.scheduling.request import EngineEvent
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.scheduling.step import RunnerOutput, SchedulerOutput
from tandem.node.control.board import LoopBoard
from tandem.node.control.events import Received
from tandem.node.control.outgoing import Outgoing
from tandem.node.control.plane import ControlPlane
from tandem.node.control.sockets import ControlSockets
from tandem.node.handoffs import Handoffs
from tandem.node.requests import RequestBook
from tandem.node.serving import ServingNode

VOCAB, MAX_MODEL_LEN, BLOCK = 32000, 4096, 64
NUM_ROUTERS = 4
PARTS = ("schedule", "execute", "update", "book", "encode")
NUM_TOKENS = 50  # different ones in prompts that are looked up
STEP_S = 0.010  # of virtual time
LOOK_UP = '{"method": "ngram", "num_speculative_tokens": %d, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'


class NoDevice:
    """Runner and handle at once: the host's part of a step as `ModelRunner` does it, without kernels."""

    def __init__(self, max_num_seqs: int, max_rows: int) -> None:
        device = torch.device("cpu")
        self._state = BatchState(max_num_seqs, MAX_MODEL_LEN, BLOCK, VOCAB, (), device)
        self._batch = DecodeBatch(None, self._state, max_rows, MAX_MODEL_LEN)  # type: ignore[arg-type]
        self._ids, self._random = np.arange(max_num_seqs, dtype=np.int32), random.Random(0)
        self.step_id = -1

    def execute(self, output: SchedulerOutput) -> Handle:
        self._state.apply(output.new_slots, output.block_appends, output.samples)
        if output.is_decode:
            self._batch.fill(output.rows, len(output.rows))
            assert self._state.are_plain(output.samples)
        return Handle(output.step_id, self._ids[: len(output.samples)])

    def draw(self, output: SchedulerOutput, chance: float) -> np.ndarray:
        """Tokens by which each draft of a step is right with such a chance."""
        drafts = [sample.draft for sample in output.samples[1:]] + [-1]
        drawn = [self._random.randrange(NUM_TOKENS) for _ in drafts]
        for index, draft in enumerate(drafts):
            if draft >= 0:
                drawn[index] = draft if self._random.random() < chance else (draft + 1) % NUM_TOKENS
        return np.array(drawn, np.int32)


@dataclass
class Handle:
    """A step's result that is there at once."""

    step_id: int
    token_ids: np.ndarray

    def done(self) -> bool:
        return True

    def result(self) -> RunnerOutput:
        return RunnerOutput(self.step_id, self.token_ids)


@dataclass
class Node:
    """A unified node's logic with `num_rows` requests that decode, spread over the routers."""

    num_rows: int
    num_drafts: int = 0
    chance: float = 0.0  # that a draft is right
    took_ns: dict[str, list[int]] = field(default_factory=lambda: {part: [] for part in PARTS})

    def __post_init__(self) -> None:
        pool = BlockPool(self.num_rows * (MAX_MODEL_LEN // BLOCK), enable_caching=True)
        options = SchedulerOptions(
            max_num_seqs=self.num_rows,
            max_num_batched_tokens=8192,
            decode_prompt_budget=2048,
            speculative_config=LOOK_UP % self.num_drafts if self.num_drafts else "",
        )
        self._now = 0.0
        scheduler = Scheduler(
            SchedulerState(
                options,
                pool,
                block_size=BLOCK,
                max_model_len=MAX_MODEL_LEN,
                eos_token_ids=(2,),
                root_for_salt=lambda salt: root_hash(b"benchmark", salt),
                limits_prompt_work=True,
                clock=StepClock(lambda: self._now) if self.num_drafts else None,
            )
        )
        if self.num_drafts:
            scheduler.state.step_times.measured({1: STEP_S, options.max_num_batched_tokens: STEP_S})
        book, keys = RequestBook(VOCAB, MAX_MODEL_LEN), load_cluster_keys("", "127.0.0.1")
        handoffs = Handoffs(node_info(), keys, pool, NodeOptions("unified", ModelOptions("")), NoTiers(), Rate())
        self.logic = ServingNode(node_info(), book, scheduler, pool, options.max_queue, handoffs)
        self._runner = NoDevice(self.num_rows, self.num_rows * (1 + self.num_drafts))
        self._pending: tuple[SchedulerOutput, Handle] | None = None

    def submit(self) -> float:
        """CPU seconds that it takes to accept all requests and schedule their prompts."""
        submits = [make_submit(index) for index in range(self.num_rows)]
        begin = time.thread_time()
        for index, submit in enumerate(submits):
            self.logic.on_control(Received(router_key(index % NUM_ROUTERS), submit), 0.0)
        while self.logic.scheduler.state.queues.waiting:
            self.step(lambda *_: None)
        return time.thread_time() - begin

    def step(self, send: Callable[[str, bytes], None]) -> None:
        """One turn as `NodeLoop` and `EngineCore` do it, with a clock between the parts."""
        if self._pending is not None and self._pending[0].has_drafts:
            events = self._read()
            self._launch()
        else:
            done, self._pending = self._pending, None
            self._launch()
            launched, self._pending = self._pending, done
            events = self._read()
            self._pending = launched
        began = time.thread_time_ns()
        self.logic.on_engine_events(events)
        outbox = self.logic.drain_outbox()
        booked = time.thread_time_ns()
        for to, message in outbox:
            send(to, codec.encode(message))
        self._took(book=booked - began, encode=time.thread_time_ns() - booked)
        self._now += STEP_S

    def _launch(self) -> None:
        scheduler, began = self.logic.scheduler, time.thread_time_ns()
        output = scheduler.schedule()
        scheduled = time.thread_time_ns()
        assert output is not None
        scheduler.state.pool.step_launched(output.step_id)
        self._pending = output, self._runner.execute(output)
        self._took(schedule=scheduled - began, execute=time.thread_time_ns() - scheduled)

    def _read(self) -> list[EngineEvent]:
        if self._pending is None:
            return self.logic.scheduler.state.take_events()
        (output, handle), self._pending = self._pending, None
        if self.num_drafts:
            handle = Handle(output.step_id, self._runner.draw(output, self.chance))
        scheduler, began = self.logic.scheduler, time.thread_time_ns()
        scheduler.state.pool.step_completed(output.step_id)
        events = scheduler.state.take_events() + scheduler.update(output, handle.result())
        self._took(update=time.thread_time_ns() - began)
        return events

    def _took(self, **nanoseconds: int) -> None:
        for part, took in nanoseconds.items():
            self.took_ns[part].append(took)


def node_info() -> NodeInfo:
    return NodeInfo(node_id="host", epoch=1, role="unified")


def router_key(index: int) -> NodeKey:
    return NodeKey(f"router-{index}", 1)


def make_submit(index: int) -> Submit:
    prompt = np.random.default_rng(index).integers(0, NUM_TOKENS, 128).astype("<i4")
    return Submit(
        request_id=f"cmpl-{index:032x}",
        attempt=1,
        mode="full",
        prompt_token_ids=prompt.tobytes(),
        sampling=SamplingParams(max_tokens=MAX_MODEL_LEN - 128, temperature=0.0, ignore_eos=True),
    )


def wire_floor_us(num_rows: int) -> float:
    """Making and encoding the deltas of a step, spread over the routers, and nothing else."""
    name, times = f"cmpl-{0:032x}", []
    for turn in range(100):
        begin = time.thread_time_ns()
        for router in range(NUM_ROUTERS):
            rows = range(router, num_rows, NUM_ROUTERS)
            codec.encode(Tokens(deltas=tuple([TokenDelta(name, 1, 0, turn, (row,)) for row in rows])))
        times.append(time.thread_time_ns() - begin)
    return statistics.median(times) / 1e3


# --- with sockets -------------------------------------------------------------------------------------------


def listen(address: str, connected: Event, stop: Event) -> None:
    """A process that plays all routers: greets, pings, throws tokens away."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets, poller = [], zmq.Poller()
    for index in range(NUM_ROUTERS):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(address)
        info = NodeInfo(node_id=f"router-{index}", epoch=1, role="router")
        socket.send(codec.encode(Hello(wire_version=WIRE_VERSION, info=info)))
        assert isinstance(codec.decode_from_node(socket.recv()), Welcome)
        poller.register(socket, zmq.POLLIN)
        sockets.append(socket)
    connected.set()
    while not stop.is_set():
        for socket, _ in poller.poll(50):
            socket.recv()
    context.destroy(0)


class Plane:
    """A real control plane whose messages a process of its own reads."""

    def __init__(self) -> None:
        sockets, board = ControlSockets(load_cluster_keys("", "127.0.0.1")), LoopBoard()
        address = sockets.bind("127.0.0.1", 0)
        board.show(Status(node_id="host", epoch=1))
        self._outgoing = Outgoing(sockets.wake)
        self._control = ControlPlane(
            sockets, node_info(), Timeouts(), self._outgoing, board, lambda _: None, lambda _: None
        )
        self._control.start()
        spawn = multiprocessing.get_context("spawn")
        connected, self._stop = spawn.Event(), spawn.Event()
        self._listener = spawn.Process(target=listen, args=(address, connected, self._stop), daemon=True)
        self._listener.start()
        assert connected.wait(20), "the listener did not connect"

    def cpu_us(self, outboxes: Sequence[Sequence[tuple[str, Message]]], pause_s: float) -> tuple[float, float]:
        """(I/O thread's, sender's) CPU microseconds for one outbox, sent every `pause_s` as a step loop does."""
        process, thread = time.process_time(), time.thread_time()
        for outbox in outboxes:
            for to, message in outbox:
                self._outgoing.send(to, message)
            time.sleep(pause_s)
        process, thread = time.process_time() - process, time.thread_time() - thread
        return 1e6 * (process - thread) / len(outboxes), 1e6 * thread / len(outboxes)

    def close(self) -> None:
        self._stop.set()
        self._listener.join(5)
        self._control.stop()


def measure(num_rows: int, num_steps: int, plane: Plane, num_drafts: int, chance: float) -> str:
    node = Node(num_rows, num_drafts, chance)
    submit_s = node.submit()
    for part in PARTS:
        node.took_ns[part].clear()
    for _ in range(num_steps):
        node.step(lambda *_: None)
    parts = {part: statistics.median(times) / 1e3 for part, times in node.took_ns.items()}
    total, floor = sum(parts.values()), wire_floor_us(num_rows)
    name = f"cmpl-{0:032x}"
    outbox = [
        (router_key(r), Tokens(deltas=tuple(TokenDelta(name, 1, 0, 7, (i,)) for i in range(r, num_rows, NUM_ROUTERS))))
        for r in range(min(NUM_ROUTERS, num_rows))
    ]
    io_us, send_us = plane.cpu_us([outbox] * (num_steps // 2), 0.004)
    columns = " ".join(f"{parts[part]:9.0f}" for part in PARTS)
    submit_us = 1e6 * submit_s / num_rows
    sides = f"{submit_us:9.0f} {send_us:8.0f} {io_us:8.0f}"
    return f"{num_rows:5} {columns} {total:8.0f} {floor:7.0f} {total / floor:7.2f} {sides}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--chance", type=float, default=0.6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    plane = Plane()
    names = " ".join(f"{part:>9}" for part in PARTS)
    sides = f"{'admit/req':>9} {'send':>8} {'I/O':>8}"
    print(f"{'rows':>5} {names} {'total':>8} {'floor':>7} {'ratio':>7} {sides}  (CPU us a step)")
    for rows in args.rows.split(","):
        print(measure(int(rows), args.steps, plane, args.drafts, args.chance), flush=True)
    plane.close()


if __name__ == "__main__":
    main()
