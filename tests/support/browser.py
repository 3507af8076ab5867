"""Debian's chromium without a window, driven through its DevTools protocol over two pipes."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
LIMIT_S = 120.0  # for all that a test does with it
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--no-first-run", "--hide-scrollbars", "--force-color-profile=srgb",
]  # fmt: skip


class Tab:
    """A page that is open.

    `errors` has what its console says, `requests` the addresses that it asks for, `events` what the browser reports.
    """

    def __init__(self, reads: int, writes: int) -> None:
        self.reads, self.writes = os.fdopen(reads, "rb"), os.fdopen(writes, "wb")
        self.count, self.kept = 0, b""
        self.session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.events: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.writes.write(json.dumps(message).encode() + b"\0")
        self.writes.flush()
        while (found := self._next()).get("id") != self.count:
            self._take(found)
        assert "error" not in found, found
        return found["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.kept:
            piece = os.read(self.reads.fileno(), 1 << 16)
            assert piece, "chromium has ended"
            self.kept += piece
        text, _, self.kept = self.kept.partition(b"\0")
        return json.loads(text)

    def _take(self, event: dict[str, Any]) -> None:
        method, params = event.get("method", ""), event.get("params", {})
        self.events.append(method)
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:2000])
        elif method == "Runtime.consoleAPICalled" or method == "Log.entryAdded":
            self.errors.append(json.dumps(params)[:2000])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, file: Path, width: int = 1400, height: int = 1000, dark: bool = False) -> None:
        self.visit(file.resolve().as_uri(), width, height, dark)

    def visit(self, address: str, width: int = 1400, height: int = 1000, dark: bool = False) -> None:
        self.resize(width, height)
        self.paint(dark)
        for seen in (self.errors, self.requests, self.events):
            seen.clear()
        self.call("Page.navigate", url=address)
        while "Page.loadEventFired" not in self.events:
            self._take(self._next())
        self.settle()

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def paint(self, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def settle(self) -> None:
        """Wait until the page has drawn twice more."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def key(self, key: str, **more: Any) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **more)
        self.settle()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)


@contextmanager
def opened() -> Iterator[Tab]:
    """Start chromium, and end it with all of its processes."""
    assert CHROMIUM
    to_it, ours = os.pipe()
    ours_too, from_it = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = f'exec "$0" "$@" 3<&{to_it} 4>&{from_it}'
        words = ["bash", "-c", command, CHROMIUM, *FLAGS, f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            words,
            pass_fds=(to_it, from_it),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_it)
        os.close(from_it)
        watchdog = threading.Timer(LIMIT_S, os.killpg, (process.pid, signal.SIGKILL))
        watchdog.start()
        tab = None
        try:
            tab = Tab(ours_too, ours)
            yield tab
        finally:
            watchdog.cancel()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if tab:
                tab.reads.close()
                tab.writes.close()
