"""Chromium for tests: chromedriver, spoken to by its own protocol (WebDriver over HTTP), without another package."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

_DRIVERS, _BROWSERS = ("chromedriver",), ("chromium", "chromium-browser", "google-chrome")
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]


class Browser:
    """A session of one browser with one window."""

    def __init__(self, driver: httpx.Client, session: str) -> None:
        self._driver = driver
        self._session = session

    def open(self, address: str) -> None:
        self._post("url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what a function's body returns in the page."""
        return self._post("execute/sync", {"script": script, "args": list(arguments)})

    def click(self, selector: str) -> None:
        self._post(f"element/{self._found(selector)}/click", {})

    def write(self, selector: str, text: str) -> None:
        self._post(f"element/{self._found(selector)}/value", {"text": text})

    def text(self, selector: str) -> str:
        """Return the text of the first element that a selector finds; "" if there is none."""
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def accept(self) -> None:
        """Agree to the question that the page asks."""
        self._post("alert/accept", {})

    def look(self, width: int, height: int, dark: bool = False) -> None:
        """Set the size of the view in pixels, and which colours the page should have."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._chrome("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._chrome("Emulation.setEmulatedMedia", {"features": [scheme]})

    def picture(self) -> bytes:
        """Return the view as PNG."""
        return base64.b64decode(self._get("screenshot"))

    def complaints(self) -> list[str]:
        """Return what the console has of errors and refused loads since the last call."""
        entries = self._post("se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def eventually(self, condition: Callable[[], Any], seconds: float = 60.0) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.05)
        return bool(condition())

    def _found(self, selector: str) -> str:
        return str(self._post("element", {"using": "css selector", "value": selector})[_ELEMENT])

    def _chrome(self, command: str, parameters: dict[str, Any]) -> None:
        self._post("goog/cdp/execute", {"cmd": command, "params": parameters})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return _value(self._driver.post(f"/session/{self._session}/{path}", json=body))

    def _get(self, path: str) -> Any:
        return _value(self._driver.get(f"/session/{self._session}/{path}"))


@contextmanager
def browsing() -> Iterator[Browser]:
    """Start a browser. Skips the test, and says so, where there is none."""
    driver = next(filter(None, map(shutil.which, _DRIVERS)), None)
    binary = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if driver is None or binary is None:
        pytest.skip("CHROMIUM IS MISSING: install chromium and chromium-driver to test the page in a browser")
    with subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = next(
                found[1] for line in process.stdout if (found := re.search(r"successfully on port (\d+)", line))
            )
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as client:
                options = {
                    "browserName": "chrome",
                    "goog:chromeOptions": {"binary": binary, "args": _ARGUMENTS},
                    "goog:loggingPrefs": {"browser": "ALL"},
                }
                made = _value(client.post("/session", json={"capabilities": {"alwaysMatch": options}}))
                try:
                    yield Browser(client, made["sessionId"])
                finally:
                    client.delete(f"/session/{made['sessionId']}")
        finally:
            process.kill()


def _value(response: httpx.Response) -> Any:
    value = response.json()["value"]
    assert response.status_code == 200, value
    return value
