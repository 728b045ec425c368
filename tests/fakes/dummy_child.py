"""A child of the launcher that only behaves: says it is ready, sends heartbeats, ends on SIGTERM or as told.

    python dummy_child.py NAME MODE FOLDER --ready-fd=… [--port=…] [--node=…]

MODE: serve, bad-config (exit code 2), fails (an exception before it is ready), mute (ready, but no heartbeat in its
first life), babbling (lines that nobody can read, first of all), loading (half of its weights), stubborn (ignores
SIGTERM). Each life appends a line to FOLDER/NAME.log: its pid, its arguments, its end.
"""

from __future__ import annotations

import http.server
import os
import signal
import sys
import threading
import time
from pathlib import Path

from tandem.engine.process.launcher_pipe import LauncherPipe


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
    pipe = LauncherPipe(int(flags["ready-fd"]))
    if mode == "fails":
        raise RuntimeError("no such luck")
    if mode == "babbling":
        os.write(int(flags["ready-fd"]), b'\xa1\xff\n{"loaded": \n[1, 2]\nnull\n')
    if mode == "loading":
        pipe.loaded(0.5)
        while not (Path(folder) / "go").exists():
            time.sleep(0.05)
    ready = {"port": port} if name == "router" else {"address": f"tcp://127.0.0.1:{port}"}
    pipe.ready(**ready)
    while True:
        if mode != "mute" or not first_life:
            pipe.beat()
        time.sleep(0.1)


class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"tandem_router_active_prompts 3.0\n")

    def log_message(self, *_: object) -> None:
        pass


def serve_http(port: int) -> int:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Ready)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return int(server.server_address[1])


if __name__ == "__main__":
    main()
