"""The thread of one device: calls in order, the next one at the door, errors and cancellation."""

import threading
import time
from contextvars import ContextVar

import anyio
import pytest

from dflash_core.training.lane import Lane

PLACE: ContextVar[str] = ContextVar("PLACE", default="nowhere")


def test_calls_run_in_order_in_one_thread_with_the_callers_context() -> None:
    seen: list[tuple[int, int, str]] = []

    async def ask(lane: Lane, number: int) -> None:
        PLACE.set(f"task {number}")
        assert await lane.run(lambda: seen.append((number, threading.get_ident(), PLACE.get())) or number * 2) == number * 2

    async def main() -> None:
        lane = Lane("test")
        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(ask, lane, number)
        assert lane.asked == 0
        lane.close()

    anyio.run(main)
    assert [number for number, _, _ in seen] == list(range(20))
    assert len({thread for _, thread, _ in seen}) == 1
    assert seen[0][1] != threading.get_ident()
    assert [place for _, _, place in seen] == [f"task {number}" for number in range(20)]


def test_the_call_at_the_door_begins_while_the_event_loop_is_busy() -> None:
    began: list[float] = []

    async def main() -> float:
        lane = Lane("test")
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(lane.run, lambda: began.append(time.perf_counter()) or time.sleep(0.05))
            await anyio.sleep(0.01)
            time.sleep(0.3)  # the loop does nothing else
            free = time.perf_counter()
        lane.close()
        return free

    free = anyio.run(main)
    assert len(began) == 2
    assert began[1] < free - 0.1


def test_an_error_comes_out_as_it_was_raised_and_the_thread_goes_on() -> None:
    error = KeyError("mine")

    def fails() -> None:
        raise error

    async def main() -> None:
        lane = Lane("test")
        with pytest.raises(KeyError) as caught:
            await lane.run(fails)
        assert caught.value is error
        assert await lane.run(lambda: 7) == 7
        lane.close()

    anyio.run(main)


def test_cancelled_a_running_call_is_waited_for_and_the_one_at_the_door_never_runs() -> None:
    done: list[str] = []

    async def main() -> None:
        lane = Lane("test")
        with anyio.move_on_after(0.05):
            async with anyio.create_task_group() as group:
                group.start_soon(lane.run, lambda: time.sleep(0.3) or done.append("running"))
                group.start_soon(lane.run, lambda: done.append("at the door"))
        assert done == ["running"]
        assert lane.asked == 0
        assert await lane.run(lambda: 7) == 7
        lane.close()

    anyio.run(main)
    assert done == ["running"]


def test_a_waiting_thread_holds_nothing_and_ends_when_closed() -> None:
    import gc
    import weakref

    class Thing:
        pass

    async def main() -> None:
        lane = Lane("held")
        made = await lane.run(Thing)
        watch = weakref.ref(made)
        await lane.run(lambda: None)
        del made
        gc.collect()
        assert watch() is None
        lane.close()

    anyio.run(main)
    deadline = time.perf_counter() + 2
    while any(thread.name == "held" for thread in threading.enumerate()) and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert not any(thread.name == "held" for thread in threading.enumerate())
