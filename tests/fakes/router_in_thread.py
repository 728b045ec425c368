"""A real router (uvicorn, uvloop, ZMQ) in a thread of the test process, and a small byte-level tokenizer folder."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import uvloop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from waiting import PATIENCE_S, wait_until

from tandem.engine.contracts.config import ModelOptions, RouterOptions, Timeouts
from tandem.router.placing.siblings import Seat
from tandem.router.process.port import bind
from tandem.router.process.worker import Sources, Worker

BOS, EOS = "<|begin|>", "<|end|>"
VOCAB_SIZE = 400
# What tests wait for comes soon; nobody is given up for being slow on a busy machine.
FAST = Timeouts(
    heartbeat_s=0.3,  # a node that three of them don't reach in time gets nothing that another can take
    peer_lost_s=PATIENCE_S,
    connect_s=PATIENCE_S,
    resend_s=0.1,
    request_s=PATIENCE_S,
    drain_s=PATIENCE_S,
)
TEXT = [
    "the quick brown fox jumps over the lazy dog; def function(argument): return argument + 1\n",
    "naïve café, Ελληνικά, 日本語のテキスト, 😀🎉 emoji and more text to learn merges from the the the",
]


def make_tokenizer_folder(folder: Path, with_bos: bool = False) -> Path:
    """A folder with tokenizer.json and tokenizer_config.json: byte-level BPE, two special tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    if with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "eos_token": EOS}))
    return folder


class RouterInThread:
    """A context manager. `service` may be read from other threads; change nothing there but through `call`."""

    def __init__(
        self,
        folder: Path,
        nodes: tuple[str, ...],
        sources: Sources | None = None,
        seat: Seat | None = None,
        **options: Any,
    ) -> None:
        options.setdefault("timeouts", FAST)
        options.setdefault("model", ModelOptions(model=str(folder)))
        self.options = RouterOptions(port=0, nodes=nodes, **options)
        self._sources = sources or Sources()
        self._serving = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self.worker = Worker(self.options, seat=seat)

    def __enter__(self) -> RouterInThread:
        self._sock = bind(self.options.host, 0, share_port=False)
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        self._thread.start()
        assert self._serving.wait(PATIENCE_S), "the router did not start"
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.worker.stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the router did not stop"

    def _main(self) -> None:
        self.loop = uvloop.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self.worker.run(self._sock, self._sources, lambda _: self._serving.set()))
        self.loop.close()

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs `function` on the router's event loop."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE_S)

    def wait_ready(self) -> RouterInThread:
        wait_until(lambda: self.client.get("/ready").status_code == 200, "the router to be ready")
        return self

    def wait_idle(self) -> None:
        """Every request has ended, and every node has confirmed its cancels."""
        wait_until(lambda: self.worker.service.num_active == 0, "the router to be idle")
        self.call(self.worker.service.check_integrity)
