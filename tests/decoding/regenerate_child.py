"""A regeneration in a process of its own, to be killed: `python -m tests.decoding.regenerate_child CONFIG.yaml`."""

import sys
from pathlib import Path

import anyio
import yaml

from dflash_core.config import Config
from dflash_core.decoding.regenerate import regenerate


async def main() -> None:
    config = Config.model_validate(yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8")))
    await regenerate(config, anyio.Event(), lambda progress: None)


if __name__ == "__main__":
    anyio.run(main)
