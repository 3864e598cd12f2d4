"""Lines of progress where there is no terminal: at each tenth, with means over the steps since the line before."""

import itertools

import pytest

from dflash_core.records import StepMetrics
from flows import progress
from flows.progress import Progress, RowProgress, _duration
from tests.fakes import make_metrics


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the displays see; the last one is now."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[-1])
    return now


def step(number: int, *, loss: float = 1.0, skipped: int = 0) -> StepMetrics:
    """Two drafting blocks that accept three tokens, 50 tokens in half a second."""
    return make_metrics(
        number,
        skipped={"no rows": skipped} if skipped else {},
        tokens=50,
        blocks=2,
        loss_sum=4 * loss,
        weight_sum=4.0,
        correct=(0, 2, 1),
        counted=(0, 2, 2),
        accepted_sum=3,
        seconds=0.5,
        observed={"read_busy": 0.1, "tap_busy": 0.75, "train_busy": 0.5},
    )


def test_a_line_a_tenth_has_the_means_since_the_line_before(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with Progress() as shown:
        for number in range(1, 21):
            clock.append(clock[-1] + 0.1)
            shown(step(number, loss=number, skipped=number == 20), 20)
        assert shown.percent == 100.0
    assert len(caplog.messages) == 10
    assert caplog.messages[0] == "step  2/20  loss 1.500  simulated acceptance 2.50  100 tokens/s  tap busy 75%"
    assert caplog.messages[1] == "step  4/20  loss 3.500  simulated acceptance 2.50  100 tokens/s  tap busy 75%  8 s left"
    assert caplog.messages[-1].endswith("tap busy 75%  skipped micro-batches 1")
    assert "step 20/20  loss 19.500" in caplog.messages[-1]


def test_slow_steps_have_a_line_after_ten_seconds_and_rarer_ones_later(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """Of 10,000 steps, one a second: after 200 s a line waits for a twentieth of the time gone by, so that logs stay short."""
    shown = Progress()
    for number in range(1, 1000):
        clock.append(clock[-1] + 1)
        shown(step(number), 10_000)
    steps = [int(message.split()[1].partition("/")[0]) for message in caplog.messages]
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    assert steps[:3] == [10, 20, 30]
    assert min(gaps) == 10
    assert all(0.05 * at <= gap < 0.06 * at + 2 for at, gap in zip(steps[1:], gaps, strict=True) if at > 250)


def test_rows_have_a_rate_and_what_is_left_at_it(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with RowProgress(10_000) as rows:
        clock.append(105.0)
        rows(1000)
        assert not caplog.messages, "what takes five seconds is not watched"
        clock.append(120.0)
        rows(4000)
    assert caplog.messages == ["tokenized 4,000/10,000  200 rows/s  30 s left"]


@pytest.mark.parametrize(
    "seconds, text", [(0.4, "0 s"), (59.6, "1 min 00 s"), (61, "1 min 01 s"), (3600, "1 h 00 min"), (90_061, "25 h 01 min")]
)
def test_durations_are_read_at_a_glance(seconds: float, text: str) -> None:
    assert _duration(seconds) == text
