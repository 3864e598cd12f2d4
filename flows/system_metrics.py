"""What the machine does while a run works: processor, memory, and GPUs where nvidia-ml-py is installed."""

import time
from collections.abc import Iterator
from typing import Any

SAMPLE_EVERY_S = 10.0


class SystemMetrics:
    """Samples that are taken no more often than every SAMPLE_EVERY_S, whoever asks."""

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self._last = 0.0
        self._gpus = _gpus()
        psutil.cpu_percent()  # the first answer is about the time since this call

    def sample(self) -> list[tuple[str, float]]:
        """(name, value) of metric_names.SYSTEM; nothing when it is not time yet."""
        now = time.monotonic()
        if now - self._last < SAMPLE_EVERY_S:
            return []
        self._last = now
        return list(self._measure())

    def _measure(self) -> Iterator[tuple[str, float]]:
        import psutil

        memory = psutil.virtual_memory()
        yield "system/cpu_utilization_percentage", psutil.cpu_percent()
        yield "system/system_memory_usage_megabytes", memory.used / 1e6
        yield "system/system_memory_usage_percentage", memory.percent
        yield "system/process_memory_usage_megabytes", self._process.memory_info().rss / 1e6
        for number, gpu in enumerate(self._gpus):
            import pynvml

            yield f"system/gpu_{number}_utilization_percentage", float(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
            yield f"system/gpu_{number}_memory_usage_megabytes", pynvml.nvmlDeviceGetMemoryInfo(gpu).used / 1e6
            yield f"system/gpu_{number}_power_usage_watts", pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3


def _gpus() -> list[Any]:
    """Handles of the machine's GPUs; none without nvidia-ml-py or a driver."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    return [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
