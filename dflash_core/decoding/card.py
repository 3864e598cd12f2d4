"""The model card of an export: what it is, how it is served, and what was measured. README.md, with front matter that hubs read.

sizes, target [, report] --card--> text        written with the export, and again after each evaluation; no weight is touched
"""

import json
import os
import shlex
from pathlib import Path
from typing import Any

from dflash_core.decoding.report import DEFINITION, INTERVALS, acceptance_rows, set_rows, table
from dflash_core.decoding.variants import notes
from dflash_core.records import DrafterShape

CARD = "README.md"
SHOWN = (
    "acceptance length, this drafter",
    "acceptance length, n-gram reference",
    "acceptance length, target features zeroed",
    "acceptance rate by draft token",
    "lossless (equal to the target alone)",
    "speed-up over the target alone",
)

FRONT = """---
{base}pipeline_tag: text-generation
tags:
- dflash
- speculative-decoding
- draft-model
---
"""

TEXT = """# DFlash drafter

A drafter for speculative decoding with `{target}`, not a standalone model: it has neither embedding nor head and reads the
target's hidden states after layers {layers} (0-based; the output of that decoder layer).

- block size {block_size}: the anchor and {drafts} draft tokens a pass (`num_speculative_tokens` {drafts}); slot k predicts the token at anchor + k{offset}
- mask token id {mask}{notes}
"""

SERVED = """
vLLM counts the draft tokens:

    {vllm}

SGLang counts the anchor, too:

    {sglang}
"""

MEASURED = """
## Measured

{prompts} held-out requests, {rounds} verify rounds; {how}. {definition} {intervals} The references are an n-gram drafter and this
drafter with the target's hidden states zeroed.

{measures}

{sets}
"""


def vllm_command(target: str, drafter: str, block_size: int) -> str:
    """How vLLM serves a drafter; it counts draft tokens without the anchor, and needs attention that is not causal."""
    speculative = json.dumps({"method": "dflash", "model": drafter, "num_speculative_tokens": block_size - 1})
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(speculative)} --attention-backend flash_attn"


def sglang_command(target: str, drafter: str, block_size: int) -> str:
    """How SGLang serves a drafter; it counts draft tokens with the anchor."""
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path {shlex.quote(drafter)} --speculative-num-draft-tokens {block_size}"
    )


def card(shape: DrafterShape, target: str, *, report: dict[str, Any] | None = None, how: str = "") -> str:
    """README.md of an export. `report`: what report.json holds; `how`: in which way its texts were decoded."""
    place = "THIS_DIRECTORY"
    text = (TEXT if shape.sample_from_anchor else TEXT + SERVED).format(
        target=target,
        layers=", ".join(map(str, shape.target_layer_ids)),
        block_size=shape.block_size,
        drafts=shape.block_size - shape.first_slot,
        offset=" + 1" if shape.sample_from_anchor else "",
        mask=shape.mask_token_id,
        notes="".join(f"\n- {note}" for note in notes(shape)),
        vllm=vllm_command(target, place, shape.block_size),
        sglang=sglang_command(target, place, shape.block_size),
    )
    on_hub = target.count("/") == 1 and not Path(target).is_dir()  # as target.path is read
    front = FRONT.format(base=f"base_model: {target}\n" if on_hub else "")
    return front + text + ("" if report is None else _measured(report, how))


def _measured(report: dict[str, Any], how: str) -> str:
    rows = [{"measure": what, "value": value} for what, value in acceptance_rows(report) if what in SHOWN]
    return MEASURED.format(
        prompts=f"{report['prompts']:,}",
        rounds=f"{report['rounds']:,}",
        how=how,
        definition=DEFINITION,
        intervals=INTERVALS,
        measures="\n".join(table(rows)),
        sets="\n".join(table(set_rows(report))),
    )


def write_card(export: Path, text: str) -> None:
    """Replaces an export's card. What is half-written stands beside the export, whose files are sent elsewhere as they are."""
    place = export.with_name(f"{export.name}.{CARD}.partial")
    place.write_text(text, encoding="utf-8")
    os.replace(place, export / CARD)
