"""Every stage x first, middle, last x exception, SIGTERM: the run ends soon, whole, and with its own error."""

import pytest

from tests.training.faults import COUNT, PLACES, SAVES, STAGES, Struck, strike


def check_ledger(struck: Struck) -> None:
    """Issued = given to the trainer + returned, and what was given was trained but for a micro-batch that raised."""
    outcome, trained = struck.bench.outcome, len(struck.bench.trainer.numbers)
    assert struck.bench.trainer.numbers == list(range(trained))
    assert trained <= outcome.consumed <= outcome.issued <= COUNT
    assert outcome.consumed - trained <= (struck.error is not None)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stage", STAGES)
def test_an_error_comes_out_as_it_was_raised_and_nothing_is_saved(stage: str, place: str) -> None:
    struck = strike(stage, place, "exception")
    assert struck.error is struck.raised
    assert struck.threads == 0
    assert struck.seconds < 5.0
    assert len(struck.bench.saved) == (SAVES[place] if stage == "save" else 0)
    check_ledger(struck)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_sigterm_saves_the_last_step(stage: str, place: str) -> None:
    struck = strike(stage, place, "SIGTERM")
    assert struck.error is None
    assert struck.threads == 0
    assert struck.seconds < 5.0
    trainer, outcome = struck.bench.trainer, struck.bench.outcome
    assert outcome.saved
    assert struck.bench.saved[-1].step == trainer.step == outcome.consumed or not trainer.step
    assert outcome.stopped == (trainer.step < COUNT) or trainer.step == COUNT
    check_ledger(struck)


@pytest.mark.parametrize("stage", ["plan", "tap", "train", "log"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_errors_that_are_no_exceptions_of_ours_end_it_too(stage: str, error: type[BaseException]) -> None:
    struck = strike(stage, "middle", "exception", error=error("from a stage"))
    assert struck.error is struck.raised
    assert struck.threads == 0
    assert struck.bench.saved == []
