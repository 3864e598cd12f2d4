"""Tokenizing in other processes: the same ledgers, no torch and no Prefect in a worker, and no worker that outlives its parent."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from dflash_core.data.conversations import write_part
from dflash_core.data.shards import read_stream
from dflash_core.data.tokenization import Interrupted, Limits, row_files
from dflash_core.data.workers import Saved, Tokenizing, part_tokenizer
from dflash_core.records import Conversation
from tests.fakes import IM_END, MASK, VOCAB, chats, make_tokenizer

TOKENIZING = Tokenizing(
    tokenizer=make_tokenizer(),
    stop_ids=frozenset({IM_END}),
    mask_token_id=MASK,
    date=None,
    thinking=None,
    limits=Limits(max_length=128, too_long="cut", vocab_size=VOCAB),
)


def make_parts(directory: Path, *, parts: int, rows: int) -> list[Path]:
    paths = [directory / f"part-{number:05d}.jsonl" for number in range(parts)]
    for path in paths:
        write_part(path, [Conversation(id=row["id"], messages=row["messages"]) for row in chats(rows)])
    return paths


def test_a_pool_gives_what_this_process_gives(tmp_path: Path) -> None:
    parts = make_parts(tmp_path, parts=3, rows=40)
    with part_tokenizer(TOKENIZING, saved=tmp_path / "saved", processes=1) as tokenize:
        expected = [tokenize(part).as_dict() for part in parts]
        assert tokenize.rows_done == 120
    rows = [list(read_stream(row_files(part)[0])) for part in parts]
    for part in parts:
        row_files(part)[0].unlink()
    with part_tokenizer(TOKENIZING, saved=tmp_path / "saved", processes=2) as tokenize, ThreadPoolExecutor(3) as threads:
        assert [ledger.as_dict() for ledger in threads.map(tokenize, parts)] == expected
        assert tokenize.rows_done == 120
    (tmp_path / "stop").unlink()  # the pool's end
    assert [list(read_stream(row_files(part)[0])) for part in parts] == rows
    assert Saved(tmp_path / "saved")(parts[0]).as_dict() == expected[0], "what a worker elsewhere does"


@pytest.mark.parametrize("processes", [1, 2])
def test_a_stop_reaches_into_a_part(processes: int, tmp_path: Path) -> None:
    """20,000 conversations take many seconds; later parts end at once."""
    parts = make_parts(tmp_path, parts=1, rows=20_000)
    with part_tokenizer(TOKENIZING, saved=tmp_path / "saved", processes=processes) as tokenize:

        def stop() -> None:
            while tokenize.rows_done == 0:
                time.sleep(0.01)
            tokenize.stop()

        threading.Thread(target=stop).start()
        with pytest.raises(Interrupted):
            tokenize(parts[0])
        done = tokenize.rows_done
        assert 0 < done < 10_000
        with pytest.raises(Interrupted):
            tokenize(parts[0])
        assert tokenize.rows_done == done
    assert not any(path.exists() for path in row_files(parts[0]))


SCRIPT = """
import json, pathlib, sys
import torch  # as a flow's process has it
from dflash_core.data import workers
from tests.data.test_workers import TOKENIZING

if __name__ == "__main__":
    saved, part = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    TOKENIZING.save(saved)
    pool = workers.Pool(workers.Saved(saved), 1)
    pool(part)
    probe = "sorted({'torch', 'prefect', 'mlflow', 'datasets'} & set(__import__('sys').modules))"
    asked = (probe, "__import__('os').environ['TOKENIZERS_PARALLELISM']", "__import__('os').getpid()")
    print(json.dumps([pool._executor.submit(eval, question).result() for question in asked]), flush=True)
    sys.stdin.read()
"""


def test_a_worker_is_light_and_leaves_with_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (part,) = make_parts(tmp_path, parts=1, rows=5)
    command = [sys.executable, str(script), str(tmp_path / "saved"), str(part)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        heavy, parallel, pid = json.loads(process.stdout.readline())
        assert heavy == [], "torch alone costs seconds and 200 MB a worker"
        assert parallel == "false"
        assert alive(pid)
        process.kill()
        process.wait()
        end = time.monotonic() + 20
        while time.monotonic() < end and alive(pid):
            time.sleep(0.05)
        left = not alive(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        assert left


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
