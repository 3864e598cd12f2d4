"""The commands of README.md, as they stand there."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
NOT_RUN = "\n## Not yet run\n"
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )?(?:\S*/)?(?:make|python3?|prefect|pip|vllm|mlflow|drain|screenshots) \S")
CODE = re.compile(r"^    (.*)$|`([^`\n]+)`", re.MULTILINE)  # a line of a block, or between backticks
COMMENT = re.compile(r"\s+#.*")


def commands() -> list[str]:
    """Everything before the list of what was not run that one would type, without comments, in order, each once."""
    shown, _, _ = README.read_text(encoding="utf-8").replace("\\\n", " ").partition(NOT_RUN)
    code = (COMMENT.sub("", line or inline) for line, inline in CODE.findall(shown))
    return list(dict.fromkeys(" ".join(each.split()) for each in code if COMMAND.match(each)))


def not_run() -> list[str]:
    """What that list has between backticks: a command that begins so is run by no test."""
    _, _, rest = README.read_text(encoding="utf-8").partition(NOT_RUN)
    return [inline for _, inline in CODE.findall(rest.partition("\n## ")[0])]
