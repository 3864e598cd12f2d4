"""Python's search for garbage, kept away from what is imported: torch, Prefect and MLflow stay until the process ends, and to search
them while they grow, and once more at the end, takes seconds.

    keep_imports -> the large imports -> begin_work -> the work, whose own garbage is collected -> the end
"""

import atexit
import gc


def keep_imports() -> None:
    """To be called before the large imports: nothing is collected until `begin_work`, nor at the end of the process."""
    gc.disable()
    atexit.register(gc.freeze)


def begin_work() -> None:
    """All is imported: from here on garbage is collected again, without what is there already."""
    gc.freeze()
    gc.enable()
