"""README.md: every command in it is run by a test that is named here, or stands under "Not yet run"."""

import re
from pathlib import Path

import pytest

from tests.readme import commands, not_run

ROOT = Path(__file__).parents[1]
FLOWS = "tests/flows/test_commands.py::test_the_commands_of_the_readme_in_their_order"
RUN_BY = {  # a pattern of whole commands -> the test that runs them, or for `make test` what CI runs
    r"make quickstart": "tests/slow/test_quickstart.py::test_the_drafter_beats_both_references",
    r"make test": ".ci/run",
    r"(DFLASH_COPIES=\S+ )?python -m flows\..*": FLOWS,
    r"make (up|down)": "tests/slow/test_operations.py::test_full_run_from_conversations_to_a_registered_drafter_and_again",
    r"make deploy": "tests/flows/test_deployment.py::test_make_deploy_brings_pool_queues_and_automations_and_may_be_repeated",
    r"prefect deploy --all": "tests/flows/test_elsewhere.py::test_all_deployments_load_and_run_where_they_were_deployed",
    r"prefect worker start --pool dflash": "tests/flows/test_deployment.py::test_train_deployment_runs_to_completed",
    r"prefect deployment run 'full-run/full-run' .*": "tests/slow/test_operations.py::test_full_run_from_conversations_to_a_registered_drafter_and_again",
    r"prefect deployment run 'train/train' .*": "tests/flows/test_deployment.py::test_train_deployment_runs_to_completed",
    r"prefect deployment schedule resume .*": "tests/flows/test_deployment.py::test_the_schedule_is_switched_on_and_the_queues_are_listed",
    r"prefect work-queue ls .*": "tests/flows/test_deployment.py::test_the_schedule_is_switched_on_and_the_queues_are_listed",
    r"infra/drain PID": "tests/slow/test_operations.py::test_a_drained_worker_ends_when_its_run_has",
    r"\.venv/bin/mlflow ui .*": "tests/flows/test_commands.py::test_mlflows_page_shows_the_runs",
}


@pytest.mark.parametrize("command", commands())
def test_a_command_is_run_by_one_test_or_listed_as_not_run(command: str) -> None:
    tests = [test for pattern, test in RUN_BY.items() if re.fullmatch(pattern, command)]
    listed = [begin for begin in not_run() if command.startswith(begin)]
    assert len(tests) + len(listed) == 1, f"run by {tests}, listed as {listed}"


@pytest.mark.parametrize("test", sorted(set(RUN_BY.values())))
def test_what_runs_commands_is_there(test: str) -> None:
    file, _, name = test.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert f"\ndef {name}(" in text if name else re.search(r"^make test$", text, re.MULTILINE)


def test_every_pattern_is_of_a_command_that_is_still_there() -> None:
    assert [pattern for pattern in RUN_BY if not any(re.fullmatch(pattern, command) for command in commands())] == []
