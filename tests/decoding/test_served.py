"""A running server measured by its own counters; the server is a process of its own."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest

from dflash_core.config import Config
from dflash_core.decoding.report import served_markdown
from dflash_core.decoding.served import measure_served
from dflash_core.measurement import measure_endpoint
from dflash_core.records import Estimate
from dflash_core.rundir import open_run
from tests import fakes


@contextmanager
def server(kind: str) -> Iterator[str]:
    command = [sys.executable, "-m", "tests.decoding.speculating_server", kind]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    try:
        assert child.stdout is not None
        yield f"http://127.0.0.1:{int(child.stdout.readline())}/v1"
    finally:
        child.kill()
        child.wait()


def config_of(root: Path, target: Path, **evaluation: object) -> Config:
    rows = [
        {"turns": ["a", "b"]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "c"}]},
        {"turns": ["d"]},
    ]
    file = fakes.write_jsonl(root / "p.jsonl", rows)
    sets = {"chat": {"path": str(file), "thinking": False}}
    return fakes.make_config(root, target, evaluation={"prompts": None, "prompt_sets": sets, **evaluation})


@pytest.mark.parametrize("batch_size", [1, 2])
def test_vllm_counters_around_our_prompts_are_the_report(tmp_path: Path, target_dir: Path, batch_size: int) -> None:
    config = config_of(tmp_path, target_dir, batch_size=batch_size, temperature=0.5)
    with server("vllm") as url:
        [report] = anyio.run(measure_served, url, config)
        seen = json.load(urllib.request.urlopen(url.replace("/v1", "/seen")))
    assert (report.prompt_set, report.model, report.source) == ("chat", "heron-7b", "counters")
    assert (report.requests, report.tokens, report.rounds) == (4, 48, 16)
    assert report.acceptance_interval == Estimate(value=3.0, low=3.0, high=3.0)  # (1 + 2 + 2 + 3) / 4 + 1
    assert report.acceptance_by_slot == (1.0, 0.75, 0.25, 0.0, 0.0, 0.0, 0.0)
    assert 0 < report.seconds_median <= report.seconds_p95
    later = next(body for body in seen if len(body["messages"]) == 3)
    assert [message["content"] for message in later["messages"]] == ["a", "answer 1", "b"]
    assert later["chat_template_kwargs"] == {"enable_thinking": False}
    assert (later["temperature"], later["max_tokens"], later["model"]) == (0.5, 12, "heron-7b")


def test_a_gauge_is_marked_as_such(tmp_path: Path, target_dir: Path) -> None:
    with server("sglang") as url:
        [report] = anyio.run(measure_served, url, config_of(tmp_path, target_dir))
    assert report.source == "gauge of the last rounds"
    assert report.acceptance_interval == Estimate(value=2.75, low=2.75, high=2.75)
    assert (report.rounds, report.acceptance_by_slot) == (0, ())


def test_the_report_is_written_into_the_run(tmp_path: Path, target_dir: Path) -> None:
    config = config_of(tmp_path, target_dir)
    run = open_run(config)

    async def measured(url: str) -> object:
        return await measure_endpoint(config, run, url, anyio.Event())

    with server("vllm") as url:
        reports = anyio.run(measured, url)
    assert json.loads((run.root / "served.json").read_text())["sets"] == json.loads(json.dumps(reports))
    text = (run.root / "served.md").read_text()
    assert text == served_markdown(url, reports)  # type: ignore[arg-type]
    assert "| chat | 4 | 16 | 3.00 [3.00, 3.00] | 1.00  0.75  0.25" in text


@pytest.mark.parametrize(
    ("kind", "prompt", "message"),
    [
        ("none", "a", r"/metrics has neither vllm:spec_decode_num_drafts nor sglang:spec_accept_length"),
        ("vllm", "refuse me", r"/v1/chat/completions: status 400, context length exceeded"),
    ],
)
def test_a_server_that_cannot_be_measured_is_bad_input(
    tmp_path: Path, target_dir: Path, kind: str, prompt: str, message: str
) -> None:
    config = config_of(tmp_path, target_dir)
    fakes.write_jsonl(tmp_path / "p.jsonl", [{"turns": [prompt]}])
    with server(kind) as url, pytest.raises(ValueError, match=message):
        anyio.run(partial(measure_served, url, config))


def test_a_server_that_is_not_there_is_named(tmp_path: Path, target_dir: Path) -> None:
    with server("vllm") as url:
        pass
    with pytest.raises(ValueError, match=r"--endpoint http://127\.0\.0\.1:\d+/v1/models does not answer"):
        anyio.run(measure_served, url, config_of(tmp_path, target_dir))
