"""The pictures of this directory, from a running stack (`make up`), by headless chromium:

    .venv/bin/python docs/screenshots.py CHAIN TRAINING RUN,RUN MODEL

CHAIN, TRAINING: ids of a finished flow run of full-run and of its training. RUN,RUN: MLflow runs to compare, MODEL: a registered model.
The servers are those of PREFECT_API_URL and DFLASH_MLFLOW_URI.
"""

import base64
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from PIL import Image
from websockets.sync.client import ClientConnection, connect

HERE = Path(__file__).absolute().parent
PATIENCE_S, SETTLE_S = 120, 3
SETTINGS = """
localStorage.setItem("mlflow.assistant.panelOpen_v1", "false")  // else it covers a quarter of the page
localStorage.setItem("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true")
"""
RELATIVE = """
for (const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT); walk.nextNode(); )
  walk.currentNode.data = walk.currentNode.data.replace(%s, "")
"""  # paths of this machine, as seen from the repository
CLICK = "for (const found of document.querySelectorAll(%s)) found.click()"


class Page:
    """A page of the browser, driven through its debugging protocol."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._number = socket, 0
        self("Page.enable")
        self("Page.addScriptToEvaluateOnNewDocument", source=SETTINGS)

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while (answer := json.loads(self._socket.recv(PATIENCE_S))).get("id") != self._number:
            pass
        return answer["result"]

    def evaluate(self, script: str) -> Any:
        return self("Runtime.evaluate", expression=script)["result"].get("value")

    def picture(self, name: str, size: tuple[int, int], address: str, *texts: str, click: str = "") -> None:
        """Saves NAME.png, in 128 colours, once all `texts` are on the page and `click` (a selector) was clicked. Raises TimeoutError
        where one of the texts does not come."""
        self("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1, mobile=False)
        self("Page.navigate", url="about:blank")
        self("Page.navigate", url=address)
        end = time.monotonic() + PATIENCE_S
        while missing := [text for text in texts if not self.evaluate(f"document.body.innerText.includes({json.dumps(text)})")]:
            if time.monotonic() > end:
                raise TimeoutError(f"{address}: no {missing} on the page:\n{self.evaluate('document.body.innerText')}")
            time.sleep(0.5)
        if click:
            self.evaluate(CLICK % json.dumps(click))
        time.sleep(SETTLE_S)
        self.evaluate(RELATIVE % json.dumps(f"{HERE.parent}/"))
        raw = base64.b64decode(self("Page.captureScreenshot", format="png")["data"])
        Image.open(io.BytesIO(raw)).convert("RGB").quantize(128).save(HERE / f"{name}.png", optimize=True)


@contextmanager
def browser() -> Iterator[Page]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        command = [os.environ.get("CHROMIUM", "chromium"), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options = [f"--user-data-dir={home}", "--remote-debugging-port=0", "about:blank"]
        child = subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL)
        try:
            port = Path(home) / "DevToolsActivePort"
            while not port.is_file() or not port.read_text().strip():
                time.sleep(0.2)
            pages = httpx.get(f"http://127.0.0.1:{port.read_text().split()[0]}/json/list").json()
            address = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
            with connect(address, max_size=None) as socket:
                yield Page(socket)
        finally:
            child.send_signal(signal.SIGTERM)
            child.wait()


def main(chain: str, training: str, runs: str, model: str) -> None:
    api, mlflow = os.environ["PREFECT_API_URL"], os.environ["DFLASH_MLFLOW_URI"]
    prefect = api.removesuffix("/api")
    deployment = httpx.get(f"{api}/deployments/name/full-run/full-run").json()["id"]
    chosen = runs.split(",")
    first = httpx.get(f"{mlflow}/api/2.0/mlflow/runs/get", params={"run_id": chosen[0]}).json()["run"]
    with browser() as page:
        page.picture("prefect-chain", (1500, 500), f"{prefect}/runs/flow-run/{chain}", "Completed")
        page.picture("prefect-training", (1500, 1500), f"{prefect}/runs/flow-run/{training}", "Completed", click="#artifacts")
        page.picture("prefect-form", (1400, 1500), f"{prefect}/deployments/deployment/{deployment}/run", "overrides")
        asked = f"runs={quote(json.dumps(chosen))}&experiments={quote(json.dumps([first['info']['experiment_id']]))}"
        differences = '[role=switch][aria-label$="Show diff only"], [role=button]:has([aria-label="collapse Visualizations"])'
        page.picture("mlflow-compare", (1500, 1100), f"{mlflow}/#/compare-runs?{asked}", "Run details", click=differences)
        name = quote(json.dumps("train/simulated_acceptance_length"))
        curves = f"{mlflow}/#/metric?{asked}&metric={name}&plot_metric_keys=%5B{name}%5D"
        page.picture("mlflow-curves", (1500, 700), curves, "X-axis:", click="input[type=radio][value=step]")
        page.picture("mlflow-model", (1500, 1250), f"{mlflow}/#/models/{model}", "Version 1")


if __name__ == "__main__":
    main(*sys.argv[1:])
