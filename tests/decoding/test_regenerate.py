"""Regeneration against real server processes that fail on purpose: every conversation once, right, and never asked again."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_core.config import Config
from dflash_core.data.conversations import read_conversations
from dflash_core.data_config import DataConfig
from dflash_core.decoding import regenerate as regeneration
from dflash_core.decoding.drive import Progress
from dflash_core.decoding.endpoints import OutOfService
from dflash_core.preparation import prepare, prepared
from dflash_core.rundir import open_run
from tests import fakes
from tests.decoding.faulty_server import ids_of, text_of

ROOT = Path(__file__).parents[2]
QUICK = {"backoff_s": 0.01, "backoff_max_s": 0.05, "rest_s": 0.1, "timeout_s": 1.0, "concurrency": 8, "outage_s": 60.0}
StartServer = Callable[..., str]


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts a server that logs to tmp_path/<name>.log; returns its base URL."""
    children = []

    def start(name: str = "server", *options: str) -> str:
        command = [sys.executable, "-m", "tests.decoding.faulty_server", "--log", str(tmp_path / f"{name}.log"), *options]
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout is not None
        return f"http://127.0.0.1:{int(child.stdout.readline())}/v1"

    yield start
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


def log_of(tmp_path: Path, name: str = "server") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / f"{name}.log").read_text().splitlines()]


def make(tmp_path: Path, target_dir: Path, *endpoints: str, rows: list[Any] | None = None, **settings: Any) -> Config:
    fakes.write_jsonl(tmp_path / "conversations.jsonl", fakes.chats(24) if rows is None else rows)
    return fakes.make_config(tmp_path, target_dir, regeneration={**QUICK, "endpoints": endpoints, **settings})


def run(config: Config, *, on_row: Callable[[Progress], None] = lambda progress: None, **options: Any) -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        return await regeneration.regenerate(config, anyio.Event(), on_row, **options)

    return anyio.run(main)


def output(config: Config) -> list[dict[str, Any]]:
    return [json.loads(line) for line in regeneration.output_path(config).read_text().splitlines()]


def expected(row: dict[str, Any]) -> list[tuple[str, str]]:
    """(role, content) of a plain conversation, every assistant turn answered in the light of the answers before."""
    messages: list[dict[str, Any]] = []
    for message in row["messages"]:
        text = text_of(messages) if message["role"] == "assistant" else message["content"]
        messages.append({"role": message["role"], "content": text})
    return [(message["role"], message["content"]) for message in messages]


def said(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in row["messages"]]


def dead_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/v1"


def test_every_conversation_comes_out_once_and_right_whatever_fails(
    tmp_path: Path, target_dir: Path, start_server: StartServer
) -> None:
    rows = fakes.chats(60)
    config = make(tmp_path, target_dir, start_server("server", "--faults"), rows=rows, attempts=20, timeout_s=0.6)
    summary = run(config)
    out = output(config)
    assert [row["id"] for row in out] == [row["id"] for row in rows]
    assert [said(row) for row in out] == [expected(row) for row in rows]
    answers = [message for row in out for message in row["messages"] if message["role"] == "assistant"]
    assert [answer["token_ids"] for answer in answers] == [ids_of(answer["content"]) for answer in answers]
    assert summary["conversations"] == {"rows_in": 60, "kept": 60, "left": 0, "dropped": {}}
    assert summary["finish_reasons"] == {"stop": len(answers)} == {"stop": summary["with_token_ids"]}
    met = {line["fault"] for line in log_of(tmp_path)}
    assert met == {"", "500", "429", "disconnect", "broken JSON", "no completion", "slow"}
    assert set(summary["failures"]) == {
        "HTTP 500",
        "HTTP 429",
        "connection lost (RemoteProtocolError)",
        "a reply that is no JSON",
        "a reply that is no chat completion",
        "no answer within 0.6 s",
    }


def test_requests_say_what_the_config_says(tmp_path: Path, target_dir: Path, start_server: StartServer, monkeypatch) -> None:
    monkeypatch.setenv("KEY_OF_THE_TEST", "sesame")
    settings = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "max_tokens": 77,
        "model": "tiny",
        "api_key_env": "KEY_OF_THE_TEST",
    }
    config = make(tmp_path, target_dir, start_server(), rows=fakes.chats(2), **settings)
    run(config)
    lines = log_of(tmp_path)
    assert {line["authorization"] for line in lines} == {"Bearer sesame"}
    for line in lines:
        body = line["body"]
        asked = {key: body[key] for key in ("temperature", "top_p", "top_k", "max_tokens", "model", "return_token_ids")}
        assert asked == {
            "temperature": 0.6,
            "top_p": 0.95,
            "top_k": 20,
            "max_tokens": 77,
            "model": "tiny",
            "return_token_ids": True,
        }
        assert "chat_template_kwargs" not in body
        assert all(set(message) == {"role", "content"} for message in body["messages"])
    assert len({line["body"]["seed"] for line in lines}) == len(lines), "each turn draws for itself"
    assert "sesame" not in "".join(path.read_text() for path in (tmp_path / "runs").rglob("*") if path.is_file())


def test_a_busy_server_is_left_alone_for_as_long_as_it_says(tmp_path: Path, target_dir: Path, start_server: StartServer) -> None:
    server = start_server("server", "--busy-first", "--retry-after", "1", "--delay", "0")
    config = make(tmp_path, target_dir, server, rows=fakes.chats(4), concurrency=1)
    run(config)
    first, second, *_ = log_of(tmp_path)
    assert first["fault"] == "429"
    assert second["time"] - first["time"] >= 1.0
    assert second["first"] == first["first"]


def test_one_dead_endpoint_is_made_up_for_by_the_other(
    tmp_path: Path, target_dir: Path, start_server: StartServer, caplog
) -> None:
    rows = fakes.chats(24)
    dead = dead_address()
    config = make(tmp_path, target_dir, dead, start_server(), rows=rows, rest_s=0.05)
    summary = run(config)
    assert [said(row) for row in output(config)] == [expected(row) for row in rows]
    assert summary["conversations"]["dropped"] == {}
    assert list(summary["failures"]) == ["no connection"]
    assert f"{dead} rests for 0.05 s after 5 failures in a row: no connection" in caplog.text


def test_all_dead_is_a_clear_error_and_what_is_finished_stays(
    tmp_path: Path, target_dir: Path, start_server: StartServer
) -> None:
    rows = fakes.chats(12)
    config = make(tmp_path, target_dir, dead_address(), dead_address(), rows=rows, outage_s=0.5)
    start = time.monotonic()
    with pytest.raises(OutOfService, match=r"no endpoint has answered for 0.5 s \(regeneration.outage_s\).*no connection"):
        run(config)
    assert time.monotonic() - start < 20
    alive = make(tmp_path, target_dir, start_server(), rows=rows)
    assert run(alive)["conversations"]["kept"] == 12


@pytest.mark.parametrize("status, said_", [("401", "set the key"), ("404", "check the address and regeneration.model")])
def test_a_mistake_of_the_config_ends_the_run_at_once(
    status: str, said_: str, tmp_path: Path, target_dir: Path, start_server: StartServer
) -> None:
    config = make(tmp_path, target_dir, start_server("server", "--status", status), concurrency=1)
    with pytest.raises(OutOfService, match=f"HTTP {status}; {said_}. It says: .*made to fail"):
        run(config)
    assert len(log_of(tmp_path)) == 1


def test_a_server_without_token_ids_is_asked_without(tmp_path: Path, target_dir: Path, start_server: StartServer, caplog) -> None:
    rows = fakes.chats(12)
    config = make(tmp_path, target_dir, start_server("server", "--no-token-ids"), rows=rows, concurrency=1)
    summary = run(config)
    assert [said(row) for row in output(config)] == [expected(row) for row in rows]
    assert summary["with_token_ids"] == 0
    assert [line["fault"] for line in log_of(tmp_path)].count("400") == 1
    assert caplog.text.count("refuses return_token_ids") == 1


def test_refused_and_hopeless_conversations_leave_no_row_and_are_counted(
    tmp_path: Path, target_dir: Path, start_server: StartServer
) -> None:
    def chat(name: str, *users: str) -> dict[str, Any]:
        turns = [{"role": role, "content": text} for text in users for role, text in (("user", text), ("assistant", "old"))]
        return {"id": name, "messages": turns}

    rows = [chat("a", "fine"), chat("b", "fine too", "REFUSE this"), chat("c", "good", "POISON"), chat("a", "fine")]
    config = make(tmp_path, target_dir, start_server(), rows=[*rows, "{broken"], attempts=3, rest_after=100)
    summary = run(config)
    assert [row["id"] for row in output(config)] == ["a"]
    assert summary["conversations"] == {
        "rows_in": 5,
        "kept": 1,
        "left": 0,
        "dropped": {
            "broken JSON": 1,
            "same id and content as an earlier one": 1,
            "refused by the server (HTTP 400)": 1,
            "no answer in 3 attempts: HTTP 500": 1,
        },
    }
    before = len(log_of(tmp_path))
    assert run(config)["before"] == 1
    again = {line["first"] for line in log_of(tmp_path)[before:]}
    assert again == {"fine too", "good"}, "only what has no row is asked again"


def test_nothing_answered_is_an_error(tmp_path: Path, target_dir: Path, start_server: StartServer) -> None:
    rows = [{"id": "x", "messages": [{"role": "user", "content": "REFUSE"}, {"role": "assistant", "content": "old"}]}]
    config = make(tmp_path, target_dir, start_server(), rows=rows)
    with pytest.raises(ValueError, match=r"none of 1 conversations could be answered: 1 x refused by the server \(HTTP 400\)"):
        run(config)
    assert not regeneration.output_path(config).exists()


def test_a_share_of_the_conversations_thinks_and_the_rows_say_so(
    tmp_path: Path, target_dir: Path, start_server: StartServer
) -> None:
    config = make(
        tmp_path, target_dir, start_server("server", "--delay", "0"), rows=fakes.chats(150), thinking=0.7, concurrency=16
    )
    run(config)
    rows = output(config)
    thinking = [row["chat_template_kwargs"]["enable_thinking"] for row in rows]
    assert 0.6 < sum(thinking) / len(thinking) < 0.8
    for row, on in zip(rows, thinking, strict=True):
        answers = [message for message in row["messages"] if message["role"] == "assistant"]
        assert all(("reasoning_content" in answer) == on for answer in answers)
    for line in log_of(tmp_path):
        on = line["body"]["chat_template_kwargs"]["enable_thinking"]
        earlier = [message for message in line["body"]["messages"] if message["role"] == "assistant"]
        assert all(("reasoning_content" in message) == on for message in earlier)


@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_kill_9_loses_nothing_and_repeats_nothing(
    kills: int, tmp_path: Path, target_dir: Path, start_server: StartServer
) -> None:
    seed = random.randrange(10_000)
    print(f"seed {seed}")
    draw = random.Random(seed)
    rows = fakes.chats(80)
    server = start_server("server", "--delay", "0.1")
    config = make(tmp_path, target_dir, server, rows=rows, concurrency=4)
    whole = config.model_copy(update={"name": "whole"})
    run(whole)
    work = regeneration.output_path(config).with_name("tiny.regenerated.jsonl.work")
    command = [sys.executable, "-m", "tests.decoding.regenerate_child", str(fakes.save_config(config, tmp_path / "config.yaml"))]
    finished: set[str] = set()
    for _ in range(kills):
        wanted = len(finished) + draw.randrange(1, 60 // kills)
        child = subprocess.Popen(command, cwd=ROOT)
        while child.poll() is None and sum(path.read_bytes().count(b"\n") for path in work.glob("answers-*")) < wanted:
            time.sleep(0.01)
        time.sleep(draw.random() * 0.1)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        seen = len(log_of(tmp_path))
        lines = b"".join(path.read_bytes() for path in sorted(work.glob("answers-*"))).splitlines(keepends=True)
        finished = {json.loads(line)["messages"][0]["content"] for line in lines if line.endswith(b"\n")}
        assert len(finished) >= wanted
    with max(work.glob("answers-*")).open("ab") as file:
        file.write(b'{"source_hash": "00ff", "id": "torn')
    summary = run(config)
    asked = {line["first"] for line in log_of(tmp_path)[seen:]}
    assert summary["before"] == len(finished) < 80
    assert asked == {row["messages"][0]["content"] for row in rows} - finished
    assert regeneration.output_path(config).read_bytes() == regeneration.output_path(whole).read_bytes()
    assert list(work.glob("answers-*")) == []


def test_a_stop_request_keeps_what_is_finished(tmp_path: Path, target_dir: Path, start_server: StartServer) -> None:
    rows = fakes.chats(40)
    config = make(tmp_path, target_dir, start_server(), rows=rows, concurrency=3)

    async def stop_after_ten() -> dict[str, Any]:
        stop = anyio.Event()
        return await regeneration.regenerate(config, stop, lambda progress: stop.set() if progress.rows >= 10 else None)

    summary = anyio.run(stop_after_ten)
    counts = summary["conversations"]
    assert summary["stopped"]
    assert 10 <= counts["kept"] < 40
    assert counts["kept"] + counts["left"] == counts["rows_in"] == 40
    assert not regeneration.output_path(config).exists()
    assert run(config)["before"] == counts["kept"]
    assert [said(row) for row in output(config)] == [expected(row) for row in rows]


def test_other_settings_do_not_mix_and_fresh_sets_the_old_answers_aside(
    tmp_path: Path, target_dir: Path, start_server: StartServer
) -> None:
    server = start_server()
    run(make(tmp_path, target_dir, server, rows=fakes.chats(4)))
    config = make(tmp_path, target_dir, server, rows=fakes.chats(4), temperature=0.5)
    with pytest.raises(ValueError, match=r"made otherwise.*temperature: 1.0 -> 0.5"):
        run(config)
    assert run(config, fresh=True)["before"] == 0
    path = regeneration.output_path(config)
    assert path.with_name(path.name + ".old-1").is_file()
    assert run(config)["before"] == 4


def test_rows_in_work_are_bounded(tmp_path: Path, target_dir: Path, start_server: StartServer, monkeypatch) -> None:
    """No more conversations are read than the workers hold, the reader's hand and the writer's included."""
    read = {"count": 0}
    original = read_conversations

    def counted(*arguments: Any, **options: Any) -> Iterator[Any]:
        for conversation in original(*arguments, **options):
            read["count"] += 1
            yield conversation

    config = make(tmp_path, target_dir, start_server(), rows=fakes.chats(60), concurrency=3)
    monkeypatch.setattr(regeneration, "read_conversations", counted)
    ahead = []

    def on_row(progress: Progress) -> None:
        if progress.rows == 0:
            read["count"] = 0  # the survey is over
        ahead.append(read["count"] - progress.rows)

    run(config, on_row=on_row)
    assert len(ahead) == 61
    assert max(ahead) <= 3 + 2


def test_the_output_prepares(tmp_path: Path, target_dir: Path, start_server: StartServer) -> None:
    config = make(tmp_path, target_dir, start_server(), rows=fakes.chats(12))
    path = run(config)["output"]
    config = config.model_copy(update={"data": DataConfig(conversations=path)})
    directory = open_run(config)
    manifest = prepare(config, directory)
    assert manifest.ledger["kept"] == 12 <= manifest.rows, "turns whose ids differ from their text get rows of their own"
    assert prepared(config, directory) == manifest


# ---- in process ------------------------------------------------------------------------------------------------------


def test_in_process_every_turn_is_the_targets_own_in_the_light_of_its_own(tmp_path: Path, target_dir: Path) -> None:
    """Against transformers' generate, one prompt after the other; 40 tokens are no whole answer, so cut ones end the row."""
    stops = list(range(2, fakes.VOCAB, 9))
    target = fakes.save_target(tmp_path / "target", eos_token_id=stops, tie_word_embeddings=False)
    rows = fakes.chats(12)
    config = make(tmp_path, target, rows=rows, temperature=0, max_tokens=40, concurrency=5)
    summary = run(config)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(target)
    turns = 0
    for source, row in zip(rows, output(config), strict=True):
        assert row["id"] == source["id"]
        for place, message in enumerate(row["messages"]):
            if message["role"] == "user":
                assert message == source["messages"][place]
                continue
            prompt = tokenizer.apply_chat_template(row["messages"][:place], tokenize=False, add_generation_prompt=True)
            inputs = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
            out = model.generate(**inputs, max_new_tokens=40, do_sample=False, eos_token_id=stops, pad_token_id=0)
            assert message["token_ids"] == out[0, inputs["input_ids"].shape[1] :].tolist()
            turns += 1
        assert len(row["messages"]) == len(source["messages"]) or row["ended"] == "an answer cut by length"
    assert summary["turns"] == summary["with_token_ids"] == turns > 12
    written = regeneration.output_path(config).read_bytes()
    assert run(config)["before"] == 12
    assert regeneration.output_path(config).read_bytes() == written


def test_in_process_a_stop_request_keeps_what_is_finished(tmp_path: Path, target_dir: Path) -> None:
    """Greedy, so that the later batches' other shapes do not matter: the rest equals an uninterrupted run's."""
    config = make(tmp_path, target_dir, rows=fakes.chats(12), temperature=0, max_tokens=8, concurrency=3)
    run(config.model_copy(update={"name": "whole"}))

    async def stopped_after_two() -> dict[str, Any]:
        stop = anyio.Event()

        def on_row(progress: Progress) -> None:
            if progress.rows == 3:
                anyio.from_thread.run_sync(stop.set)

        return await regeneration.regenerate(config, stop, on_row)

    summary = anyio.run(stopped_after_two)
    assert summary["stopped"]
    assert 3 <= summary["conversations"]["kept"] < 12
    assert run(config)["before"] == summary["conversations"]["kept"]
    whole = regeneration.output_path(config.model_copy(update={"name": "whole"}))
    assert regeneration.output_path(config).read_bytes() == whole.read_bytes()
