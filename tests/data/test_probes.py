"""What opening a template finds out: the type of tool arguments, and whether the next role is the stop token."""

import datetime
from pathlib import Path

import pytest

from dflash_core.data.probes import inspect
from dflash_core.data.renders import Form
from tests.data.assets import FAMILIES
from tests.data.templates import TEMPLATES
from tests.fakes import CHATML

CALLS = CHATML.replace(
    "message['content'] +", "message['content'] + (message.tool_calls[0].function.arguments if message.tool_calls else '') +"
)


def form_of(text: str, stops: list[str]) -> Form:
    date = datetime.date(2026, 1, 31)
    form, _ = inspect(
        text, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, stops=stops, date=date, thinking=None, one_row=False
    )
    return form


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        (CALLS, str),  # a mapping cannot be joined to a text
        (CALLS.replace("function.arguments", "function.arguments | string"), str),  # a mapping reads {'city': 'Oslo'}
        (CALLS.replace("function.arguments", "function.arguments | tojson"), dict),  # a text reads "{\"city\": ...
        (TEMPLATES["T9 tool mapping"], dict),
        (CHATML, dict),
    ],
)
def test_arguments_are_what_the_template_takes(template: str, kind: type) -> None:
    assert form_of(template, ["<|im_end|>"]).template.arguments is kind


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_real_templates_take_mappings_and_only_glm_stops_by_role(assets_dir: Path, name: str) -> None:
    form = form_of((assets_dir / "templates" / f"{name}.jinja").read_text(encoding="utf-8"), list(FAMILIES[name][1]))
    assert form.template.arguments is dict
    assert form.role_stops == name.startswith("GLM")


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_none_of_the_small_templates_stops_by_role(name: str) -> None:
    assert not form_of(TEMPLATES[name], ["<|im_end|>"]).role_stops
