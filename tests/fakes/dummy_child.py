"""A child of the launcher that only behaves: says it is ready, sends heartbeats, ends on SIGTERM or as told.

    python dummy_child.py NAME MODE FOLDER --launcher-address=… --ready-fd=… [--port=…] [--node=…]

MODE: serve, bad-config (exit code 2), mute (ready, but no heartbeat in its first life),
stubborn (ignores SIGTERM). Each life appends a line to FOLDER/NAME.log: its pid, its arguments, its end.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import zmq


def main() -> None:
    name, mode, folder = sys.argv[1:4]
    flags = dict(flag[2:].split("=", 1) for flag in sys.argv[4:])
    log = Path(folder) / f"{name}.log"
    first_life = not log.exists()
    with log.open("a") as lines:
        lines.write(f"start {os.getpid()} {flags.get('port', '-')} {flags.get('node', '-')}\n")
    print(f"{name} speaks", flush=True)
    if mode == "bad-config":
        print("tandem: bad folder", file=sys.stderr)
        sys.exit(2)

    def on_term(*_: object) -> None:
        with log.open("a") as lines:
            lines.write(f"term {time.monotonic()}\n")
        if mode != "stubborn":
            sys.exit(0)

    signal.signal(signal.SIGTERM, on_term)
    port = serve_http(int(flags.get("port", 0)))
    socket = zmq.Context().socket(zmq.PUSH)
    socket.connect(flags["launcher-address"])
    ready = {"port": port} if name == "router" else {"address": f"tcp://127.0.0.1:{port}"}
    os.write(int(flags["ready-fd"]), json.dumps(ready).encode() + b"\n")
    os.close(int(flags["ready-fd"]))
    while True:
        if mode != "mute" or not first_life:
            socket.send(msgspec.msgpack.encode({"id": name, "pid": os.getpid(), "kind": name}))
        time.sleep(0.1)


class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def serve_http(port: int) -> int:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Ready)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return int(server.server_address[1])


if __name__ == "__main__":
    main()
