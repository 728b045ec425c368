"""A node in a process of its own, driven by a test: one JSON command a line on stdin, one JSON answer on stdout.

Start it with `KVPeer(...)` from the test; the child runs this same file as a script.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

import msgspec

from tandem.engine.contracts.wire.handoff import KVGrant
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.engine.process.collector import collect_rarely
from tandem.kv_connector.transports.base import Write


def pack(struct: msgspec.Struct) -> str:
    return base64.b64encode(msgspec.msgpack.encode(struct)).decode()


def unpack(text: str, kind: type):
    return msgspec.msgpack.decode(base64.b64decode(text), type=kind)


class KVPeer:
    """Handle on the child. `info` waits until it is up."""

    def __init__(self, node_id: str, transport: str, seed: int, num_blocks: int = 16, device: str = "cpu") -> None:
        command = [sys.executable, __file__, node_id, transport, str(seed), str(num_blocks), device]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._info: NodeInfo | None = None

    @property
    def info(self) -> NodeInfo:
        if self._info is None:
            self._info = unpack(self._answer(), NodeInfo)
        return self._info

    def call(self, verb: str, *arguments):
        assert self.info
        self.tell(verb, *arguments)
        return self._answer()

    def tell(self, verb: str, *arguments) -> None:
        """Without waiting for an answer."""
        assert self.process.stdin is not None
        packed = [pack(each) if isinstance(each, msgspec.Struct) else each for each in arguments]
        self.process.stdin.write(json.dumps([verb, *packed]) + "\n")
        self.process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            stat = Path(f"/proc/{self.process.pid}/stat")
            while stat.read_text().rsplit(")", 1)[1].split()[0] != "T":
                time.sleep(0.001)

    def kill(self) -> None:
        """Idempotent, reaps."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def _answer(self):
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the peer process ended"
        return json.loads(line)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries' own lines go to stderr: UCX logs to stdout
    sys.path.insert(0, str(Path(__file__).parent))
    collect_rarely()
    from kv_pools import MEGABYTE_BLOCKS, PoolNode

    node_id, transport, seed, num_blocks, device = sys.argv[1:]
    node = PoolNode(
        node_id, transport, num_blocks=int(num_blocks), layout=MEGABYTE_BLOCKS, seed=int(seed), device=device
    )
    channel = None
    answer(answers, pack(node.info))
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        if verb == "connect":
            channel = node.connect(unpack(arguments[0], NodeInfo))
        elif verb == "write":
            grant, pairs, layers, num_valid = arguments
            channel.write(Write(unpack(grant, KVGrant), pairs, layers and range(*layers), num_valid))
            channel.flush(unpack(grant, KVGrant))
        elif verb == "write_for_ever":
            write_for_ever(node, channel, unpack(arguments[0], KVGrant))
        elif verb == "admit":
            node.admit(unpack(arguments[0], NodeInfo))
        elif verb == "open_grant":
            node.transports.open_grant(unpack(arguments[0], KVGrant))
        elif verb == "block_equals":
            block, value = arguments
            answer(answers, bool((node.pool[block] == value).all()))
            continue
        answer(answers, True)


def write_for_ever(node, channel, grant: KVGrant) -> None:
    """Never the same bytes twice, so that the sink can tell whether stores still land."""
    while True:
        node.pool[0] += 1
        channel.write(Write(grant, [(0, block) for block in grant.block_ids], None, [64] * len(grant.block_ids)))


def answer(answers: TextIO, value: object) -> None:
    print(json.dumps(value), file=answers, flush=True)


if __name__ == "__main__":
    main()
