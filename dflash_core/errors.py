"""Errors in a line, and of task groups: the error of one as the error that caused it, and its end at a stop request."""

from collections.abc import Iterator
from contextlib import contextmanager

import anyio


@contextmanager
def unwrapped() -> Iterator[None]:
    """The first error of a task group itself, instead of the group; further ones become notes."""
    try:
        yield
    except BaseExceptionGroup as group:
        first, *others = _leaves(group)
        for other in others:
            first.add_note(f"also raised: {other!r}")
        context = first.__context__
        try:
            raise first
        finally:
            first.__context__ = context  # its own, not the group


def first_line(error: BaseException) -> str:
    """The first line of what an error says; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


async def cancel_when(stop: anyio.Event, scope: anyio.CancelScope) -> None:
    """A task of a group that ends its `scope` when `stop` is set."""
    await stop.wait()
    scope.cancel()


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error]
