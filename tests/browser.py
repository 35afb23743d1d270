"""A real browser for tests: Chromium, driven as docs/site/screenshots.py drives it."""

import asyncio
import importlib.util
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

_PROGRAM = Path(__file__).resolve().parents[1] / "docs" / "site" / "screenshots.py"
_SPEC = importlib.util.spec_from_file_location("screenshots", _PROGRAM)
screenshots = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(screenshots)

CHROMIUM = next(filter(None, map(shutil.which, screenshots.BROWSERS)), None)

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium (Debian: apt-get install chromium)"
)


class Page:
    """A tab with a page in it."""

    def __init__(self, tab):
        self._tab = tab

    async def open(self, url, *, width, scheme="light"):
        """Show ``url`` in a window of this width, to a reader who prefers ``scheme``."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        await self._tab.ask("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self._tab.ask("Emulation.setEmulatedMedia", features=features)
        await self._tab.ask("Page.navigate", url=url)
        await self.until(f"document.readyState + location.href === {'complete' + url!r}")

    async def value(self, expression):
        """What ``expression`` of JavaScript is in the page."""
        told = await self._tab.ask(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in told, (expression, told["exceptionDetails"])
        return told["result"].get("value")

    async def until(self, condition):
        """Wait until ``condition`` holds in the page."""
        deadline = time.monotonic() + PATIENCE_S
        while not await self.value(condition):
            assert time.monotonic() < deadline, condition
            await asyncio.sleep(0.05)


def with_browser(look):
    """What the coroutine ``look(page)`` gives for a tab of a browser that is started for it."""

    async def run():
        # Processes of the browser's own may write to it for a moment after the browser has ended.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            async with screenshots.opened(CHROMIUM, Path(profile)) as tab:
                return await look(Page(tab))

    return asyncio.run(run())
