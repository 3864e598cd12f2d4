"""What a run shows on its Prefect page, and the events that others may act on. Outside a flow run all of it does nothing.

    following   a progress bar while a stage works          show_report   text, table, picture and link at the end
    announce    dflash.drafter.exported, dflash.drafter.promoted: infra/prefect.yaml starts an evaluation from the first

The server may be away: that is a warning, and the run goes on.
"""

import base64
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
from prefect.artifacts import (
    acreate_image_artifact,
    acreate_link_artifact,
    acreate_markdown_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)
from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.exceptions import PrefectHTTPStatusError

from dflash_core.config import Config
from dflash_core.decoding.report import acceptance_rows, served_markdown, set_rows
from dflash_core.rundir import RunDirectory, config_fingerprint
from flows.running import beside

LOG = logging.getLogger("flows")
UPDATE_EVERY_S = 5.0
EXPORTED, PROMOTED = "dflash.drafter.exported", "dflash.drafter.promoted"


@asynccontextmanager
async def following(percent: Callable[[], float], key: str) -> AsyncIterator[None]:
    """A progress artifact that shows `percent()`, 0 to 100, every few seconds while the block runs, and at its end."""
    if FlowRunContext.get() is None:
        yield
        return
    shown = _Shown(percent, key)
    try:
        async with beside(shown.follow):
            yield
    finally:
        with anyio.move_on_after(UPDATE_EVERY_S, shield=True):  # a server that is away holds nothing up
            await shown.update()


class _Shown:
    """A progress artifact and what it shows."""

    def __init__(self, percent: Callable[[], float], key: str) -> None:
        self._percent, self._key = percent, key
        self._artifact: Any = None
        self._last = -1.0

    async def follow(self) -> None:
        while True:
            await self.update()
            await anyio.sleep(UPDATE_EVERY_S)

    async def update(self) -> None:
        now = round(self._percent(), 1)
        with _server_may_be_away():
            if self._artifact is None:
                self._artifact = await acreate_progress_artifact(progress=now, key=self._key, description=f"{self._key}, percent")
            elif now != self._last:
                await aupdate_progress_artifact(self._artifact, progress=now)
            self._last = now


async def show_report(report: dict[str, Any], run: RunDirectory, mlflow_page: str | None) -> None:
    """The finished report as text, its acceptance as a table, its pictures, and a link to the MLflow run."""
    if FlowRunContext.get() is None:
        return
    with _server_may_be_away():
        await acreate_markdown_artifact(key="report", markdown=run.report_text.read_text(encoding="utf-8"))
        rows = [{"what": what, "value": value} for what, value in acceptance_rows(report)]
        await acreate_table_artifact(key="acceptance", table=rows, description=f"Acceptance of {report['name']}")
        await acreate_table_artifact(key="prompt-sets", table=set_rows(report), description=f"Prompt sets of {report['name']}")
        for key, picture, description in (
            ("data", run.picture, "Rows by length and supervision"),
            ("drafts", run.acceptance_picture, "Acceptance by draft token, and tokens a round"),
            ("training-curve", run.training_picture, "Loss and simulated acceptance over the steps"),
        ):
            if picture.is_file():
                await acreate_image_artifact(key=key, image_url=_inline(picture), description=description)
        if mlflow_page is not None:
            await acreate_link_artifact(key="mlflow", link=mlflow_page, link_text=f"MLflow run of {report['name']}")


async def show_served(endpoint: str, served: list[dict[str, Any]]) -> None:
    """What a running server was measured at."""
    if FlowRunContext.get() is None:
        return
    with _server_may_be_away():
        await acreate_markdown_artifact(key="served", markdown=served_markdown(endpoint, served))


async def show_promotion(markdown: str) -> None:
    """Every gate of a promotion, and what became of the drafter."""
    if FlowRunContext.get() is None:
        return
    with _server_may_be_away():
        await acreate_markdown_artifact(key="promotion", markdown=markdown)


def _inline(picture: Path) -> str:
    """A PNG as an address that needs no other server."""
    return "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()


def announce(event: str, config: Config, run: RunDirectory, *, path: str, overrides: dict[str, Any], **facts: Any) -> None:
    """Tells the server that a drafter is there. `path` and `overrides` are the run's, for whoever goes on from it."""
    if FlowRunContext.get() is None:
        return
    labels = {f"dflash.{name}": str(value).lower() for name, value in facts.items()}
    emit_event(
        event,
        resource={"prefect.resource.id": f"dflash.drafter.{config.name}", "prefect.resource.name": config.name, **labels},
        payload={
            "config": path,
            "overrides": overrides,
            "export": str(run.export),
            "config_fingerprint": config_fingerprint(config),
            **facts,
        },
    )


@contextmanager
def _server_may_be_away() -> Iterator[None]:
    """What a page lacks is no reason to end a run."""
    try:
        yield
    except (httpx.HTTPError, PrefectHTTPStatusError) as error:
        LOG.warning("Prefect's server did not take an artifact: %s", error or type(error).__name__)
