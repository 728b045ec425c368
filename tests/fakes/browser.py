"""A real Chromium without a window, driven by its DevTools protocol over a pipe: pages that are opened, clicked, typed
into and looked at. Nothing but the browser itself is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from waiting import LOOK_EVERY_S, PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--no-first-run", "--disable-gpu"),
    *("--disable-dev-shm-usage", "--disable-background-networking", "--disable-extensions", "--hide-scrollbars"),
)

READS_FROM, WRITES_TO = 3, 4  # a browser's descriptors, by the protocol


def browser_path() -> str | None:
    """Where a Chromium is on this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A context manager: one browser process."""

    def __init__(self) -> None:
        path = browser_path()
        assert path is not None
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        def connect() -> None:
            os.dup2(to_browser, READS_FROM)
            os.dup2(from_browser, WRITES_TO)

        self._process = subprocess.Popen(
            [path, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"],
            preexec_fn=connect,
            pass_fds=(READS_FROM, WRITES_TO),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._buffer, self.events = 0, b"", list[dict[str, Any]]()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)  # which ends it
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        self._profile.cleanup()

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """The browser's answer; what happens meanwhile goes to `events`."""
        self._number += 1
        said = {"id": self._number, "method": method, "params": parameters}
        os.write(self._write, json.dumps(said | ({"sessionId": session} if session else {})).encode() + b"\0")
        end = time.monotonic() + PATIENCE_S
        while True:
            message = self._next(end)
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            self.events.append(message)

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser says nothing"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def page(self) -> Page:
        """A new tab, whose storage no other sees."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        return Page(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])


class Page:
    """A tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        for part in ("Page", "Runtime", "Log"):
            self.call(f"{part}.enable")
        self.resize(1280, 900)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def resize(self, width: int, height: int, mobile: bool = False, scale: float = 1) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )

    def prefer(self, scheme: str) -> None:
        """As if the system had "light" or "dark" colours."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """What an expression comes to, as JSON has it."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, script: str, within_s: float = PATIENCE_S) -> Any:
        """What an expression comes to once that is true."""
        end = time.monotonic() + within_s
        while not (found := self.evaluate(script)):
            assert time.monotonic() < end, f"waited {within_s:g} s for {script}"
            time.sleep(4 * LOOK_EVERY_S)
        return found

    def text(self, selector: str) -> str:
        found: str = self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    def click(self, selector: str) -> None:
        """Presses the mouse on the middle of an element, as somebody would."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.wait_for(f"{element} !== null")
        box = self.evaluate(
            f"(() => {{ const e = {element}; e.scrollIntoView({{block: 'center', behavior: 'instant'}});"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        self.move(*box)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def click_until(self, selector: str, script: str) -> None:
        """Clicks again where nothing came of it: what moves while one presses is missed, by people too."""
        end = time.monotonic() + PATIENCE_S
        while True:
            self.click(selector)
            with suppress(AssertionError):
                self.wait_for(script, 5)
                return
            assert time.monotonic() < end, f"clicked {selector} for {PATIENCE_S:g} s, waiting for {script}"

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def screenshot(self, path: Path, whole: bool = False, **options: Any) -> None:
        """`whole`: all of the page, not only what the window shows; `options` of Page.captureScreenshot."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **options)
        path.write_bytes(base64.b64decode(found["data"]))

    def complaints(self) -> list[str]:
        """What scripts threw and the browser forbade, in this tab."""
        self.evaluate("1")  # all that it said before is here then
        own = [event for event in self._browser.events if event.get("sessionId") == self._session]
        thrown = [e["params"]["exceptionDetails"] for e in own if e["method"] == "Runtime.exceptionThrown"]
        logged = [e["params"]["entry"] for e in own if e["method"] == "Log.entryAdded"]
        return [str(each) for each in thrown] + [each["text"] for each in logged if each["level"] == "error"]
