"""Pictures of the site's front page and of a server's status page, narrow and wide, light and dark.

    python docs/site/screenshots.py --out bench-out/site

`make docs` has to have built the site.  The status page is that of a server which this program starts with a package
of random weights and asks for some scores, or the one of --status-page.  The browser is Chromium, or what --browser
names; it is driven by its own DevTools protocol, so that nothing else is needed.  A page that is wider than its window,
so that a reader would have to scroll sideways, is told.

Exit status: 0; 1 a page is wider than its window; 2 the site is not built or there is no browser.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import itertools
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[2]
FRONT_PAGE = ROOT / "build" / "site" / "index.html"
WIDTHS = (400, 1200)
SCHEMES = ("light", "dark")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
START_S = 30.0


class Tab:
    """A tab of the browser, asked over its WebSocket (aiohttp's, whose type differs from release to release)."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)

    async def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a call of the DevTools protocol.

        Raises:
            RuntimeError: the browser refused it.
        """
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            told = await self._socket.receive_json(timeout=START_S)
            if told.get("id") == number:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']}")
                result: dict[str, Any] = told["result"]
                return result

    async def value(self, expression: str) -> Any:
        """What ``expression`` of JavaScript is in the page."""
        told = await self.ask("Runtime.evaluate", expression=expression, awaitPromise=True)
        return told["result"].get("value")


@contextlib.asynccontextmanager
async def opened(browser: str, profile: Path) -> AsyncIterator[Tab]:
    """A tab of a browser that is started for it.

    Raises:
        TimeoutError: the browser did not start.
    """
    flags = ["--headless", "--no-sandbox", "--hide-scrollbars", "--remote-debugging-port=0"]
    command = [browser, *flags, f"--user-data-dir={profile}", "about:blank"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        said = profile / "DevToolsActivePort"
        end = time.monotonic() + START_S
        while not said.exists() or "\n" not in said.read_text():
            if time.monotonic() > end:
                raise TimeoutError(f"{browser} did not start within {START_S:g} s")
            await asyncio.sleep(0.05)
        port = said.read_text().split("\n")[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [one for one in await answer.json() if one["type"] == "page"]
            url = pages[0]["webSocketDebuggerUrl"]
            async with session.ws_connect(url, max_msg_size=1 << 28) as socket:
                yield Tab(socket)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def picture(tab: Tab, url: str, width: int, scheme: str) -> tuple[bytes, int]:
    """A picture of the page at ``url`` as PNG, and by how many pixels the page is too wide."""
    await tab.ask(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=900,
        deviceScaleFactor=1,
        mobile=False,
    )
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    await tab.ask("Emulation.setEmulatedMedia", features=features)
    await tab.ask("Page.navigate", url=url)
    end = time.monotonic() + START_S
    while await tab.value("document.readyState + location.href") != f"complete{url}":
        if time.monotonic() > end:
            raise TimeoutError(f"{url} was not loaded within {START_S:g} s")
        await asyncio.sleep(0.05)
    await asyncio.sleep(1.5)  # the status page asks for its numbers once a second
    shot = await tab.ask("Page.captureScreenshot", captureBeyondViewport=True)
    await tab.value("localStorage.clear()")  # the site keeps the scheme that it began with
    excess = int(await tab.value("document.documentElement.scrollWidth")) - width
    return base64.b64decode(shot["data"]), excess


async def pictures(browser: str, pages: dict[str, str], out: Path) -> list[str]:
    """Write a picture of each page, width and scheme; a line for each page that is too wide."""
    wide = []
    with tempfile.TemporaryDirectory() as profile:
        async with opened(browser, Path(profile)) as tab:
            for (name, url), width, scheme in itertools.product(pages.items(), WIDTHS, SCHEMES):
                path = out / f"{name}-{width}-{scheme}.png"
                png, excess = await picture(tab, url, width, scheme)
                path.write_bytes(png)
                print(path)
                if excess > 0:
                    wide.append(f"{name} at {width} px, {scheme}: {excess} px too wide")
    return wide


@contextlib.contextmanager
def own_status_page(folder: Path) -> Iterator[str]:
    """The address of the status page of a server that has answered some calls for a model of random weights."""
    # They bring torch, which pictures of a running server's page do without.
    from tessera.serving.bench.forward import dlrm  # noqa: PLC0415
    from tessera.serving.packaging.options import PackageOptions  # noqa: PLC0415
    from tessera.serving.packaging.package import write_model  # noqa: PLC0415
    from tessera.serving.server.background import ServerProcess  # noqa: PLC0415

    model = folder / "random.pt"
    write_model(dlrm(10_000, "murmur3"), model, PackageOptions(name="random"))
    with ServerProcess(["--model", str(model)]) as server:
        predict = [sys.executable, "-m", "tessera", "predict", "--address", server.address]
        some = ["--model-file", str(model), "--random", "2000", "--batch", "20"]
        subprocess.run([*predict, *some], check=True, stdout=subprocess.DEVNULL)
        yield f"http://127.0.0.1:{server.http_port}/"


def main() -> int:
    """Take the pictures; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    parser.add_argument(
        "--status-page", metavar="URL", help="of a running server (default: start one)"
    )
    parser.add_argument(
        "--browser", help=f"a program (default: the first of {', '.join(BROWSERS)})"
    )
    args = parser.parse_args()
    browser = args.browser or next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None or shutil.which(browser) is None:
        print(
            "there is no Chromium; install it (Debian: apt-get install chromium) or give --browser"
        )
        return 2
    if not FRONT_PAGE.exists():
        print(f"{FRONT_PAGE} does not exist; run make docs first")
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    pages = {"front": FRONT_PAGE.as_uri()}
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        pages["status"] = args.status_page or stack.enter_context(own_status_page(Path(folder)))
        wide = asyncio.run(pictures(browser, pages, args.out))
    print("\n".join(wide))
    return 1 if wide else 0


if __name__ == "__main__":
    sys.exit(main())
