"""The error of a task group as the error that caused it."""

from collections.abc import Iterator
from contextlib import contextmanager


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


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error]
