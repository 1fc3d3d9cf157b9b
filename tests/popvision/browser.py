"""Headless Chromium, told what to do over a pair of pipes (DevTools protocol): no driver, no other package."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page of one browser. Close it when done."""

    def __init__(self, width: int = 1400, height: int = 1000) -> None:
        assert PROGRAM is not None
        # Chromium's helper processes may write for a moment after the first one has ended.
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        here_out, there_in = os.pipe()[::-1]
        here_in, there_out = os.pipe()
        command = [
            PROGRAM,
            *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
            *("--disable-dev-shm-usage", f"--window-size={width},{height}", "--remote-debugging-pipe"),
            f"--user-data-dir={self._folder.name}",
            "about:blank",
        ]

        def with_pipes() -> None:
            # Chromium reads from 3 and writes to 4. Moved out of the way first: they may be 3 and 4 themselves.
            source, target = (fcntl.fcntl(end, fcntl.F_DUPFD, 5) for end in (there_in, there_out))
            os.dup2(source, 3)
            os.dup2(target, 4)

        self._process = subprocess.Popen(
            command,
            preexec_fn=with_pipes,
            close_fds=False,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there_in)
        os.close(there_out)
        self._in, self._out, self._rest, self._number = here_in, here_out, b"", 0
        self.faults: list[str] = []
        self._session = ""
        targets = self.send("Target.getTargets")["targetInfos"]
        target = next(entry["targetId"] for entry in targets if entry["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime"):
            self.send(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command's result. Faults of the page that are heard of meanwhile are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("method") == "Runtime.exceptionThrown":
                self.faults.append(json.dumps(answer["params"]["exceptionDetails"]))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._in, 1 << 20)
            assert part, "the browser has gone"
            self._rest += part
        text, self._rest = self._rest.split(b"\0", 1)
        return json.loads(text)

    def open(self, path: Path, view: str = "") -> None:
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=f"{path.resolve().as_uri()}{'#' + view if view else ''}")
        self.value(
            "new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))"
        )
        self.settle()

    def settle(self) -> None:
        """Wait until the page has drawn."""
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)
        self.settle()

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, **text)
        self.settle()

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)
        self.settle()

    def screenshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        try:
            self._process.wait(timeout=240)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._folder.cleanup()
