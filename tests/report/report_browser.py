"""A real browser, controlled through a pipe with Chrome's debugging protocol: no driver, no package, no network."""

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe"
)


class Browser:
    """One page of one browser; `problems` collects every script error and every refused resource."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={folder / 'profile'}", "about:blank"]
        # Chrome reads from descriptor 3 and writes to 4; a shell connects our pipes to them.
        self._process = subprocess.Popen(
            ["sh", "-c", 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null', *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._unread = b""
        self._number = 0
        self._session: str | None = None
        self.problems: list[str] = []
        self._loaded = False
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])

    def open(self, page: Path, width: int, height: int, *, dark: bool = False, media: str = "") -> None:
        """Open a page at a size and wait until it is loaded."""
        self.problems.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self._loaded = False
        self.call("Page.navigate", url=page.as_uri())
        while not self._loaded:
            self._read()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """A screenshot as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def pdf(self, path: Path) -> None:
        """The page as printed."""
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"]))

    def _read(self) -> dict[str, Any]:
        """Read the next message and record errors."""
        assert self._process.stdout is not None
        while b"\0" not in self._unread:
            part = self._process.stdout.read(2**20)
            assert part, "the browser has ended"
            self._unread += part
        line, self._unread = self._unread.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.exceptionThrown":
                self.problems.append(str(message["params"]["exceptionDetails"]))
            case "Log.entryAdded" if message["params"]["entry"]["level"] in ("error", "warning"):
                self.problems.append(message["params"]["entry"]["text"])
            case "Runtime.consoleAPICalled":
                self.problems.append(str(message["params"]["args"]))
            case "Network.requestWillBeSent":
                url = message["params"]["request"]["url"]
                if not url.startswith(("file:", "data:")):
                    self.problems.append(f"loads {url}")
        return message

    def close(self) -> None:
        """End the browser that was started here."""
        self._process.terminate()
        self._process.communicate(timeout=30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
