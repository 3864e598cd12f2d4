"""What tasks hand each other: paths and small records, whatever the number of rows, so that nothing large is kept by Prefect."""

import functools
import inspect
import io
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from prefect import Task

from flows import evaluate, prepare, train
from tests import fakes

pytestmark = pytest.mark.usefixtures("api")
LIMIT = 2**14  # bytes; the largest is a third of it
NO_DATA = ("Event", "NoTracker", "InProcess", "Pool")


class _Sizes(pickle.Pickler):
    """Pickles all but what is no data: the stop request, and those that work."""

    def persistent_id(self, value: Any) -> str | None:
        return type(value).__name__ if type(value).__name__ in NO_DATA else None


def size(value: Any) -> int:
    out = io.BytesIO()
    _Sizes(out).dump(value)
    return len(out.getvalue())


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes of the largest arguments and result of every task that is called, by its name."""
    largest: dict[str, int] = {}

    def watched(task: Task[Any, Any]) -> Callable[..., Any]:
        fn = task.fn

        def see(value: Any) -> Any:
            largest[task.name] = max(largest.get(task.name, 0), size(value))
            return value

        @functools.wraps(fn)
        async def later(*args: Any, **kwargs: Any) -> Any:
            return see(await fn(*see(args), **see(kwargs)))

        @functools.wraps(fn)
        def now(*args: Any, **kwargs: Any) -> Any:
            return see(fn(*see(args), **see(kwargs)))

        return later if inspect.iscoroutinefunction(fn) else now

    for module in (prepare, train, evaluate):
        for task in vars(module).values():
            if isinstance(task, Task):
                monkeypatch.setattr(task, "fn", watched(task))
    return largest


def test_arguments_and_results_of_tasks_do_not_grow_with_the_data(
    run_file: Path, tmp_path: Path, handed: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_MLFLOW_URI", "none")
    fakes.write_jsonl(tmp_path / "conversations.jsonl", fakes.chats(1500))
    anyio.run(partial(train.train, config=str(run_file), overrides={"training.max_steps": 30}))
    assert set(handed) == {"select", "tokenize", "shard", "train_drafter", "export_drafter", "evaluate_export", "report"}
    print(handed)
    assert {name: found for name, found in handed.items() if found > LIMIT} == {}
