"""Names of devices: cpu, cuda:0, and for a target whose layers are spread over several cuda:0+cuda:1."""

from dflash_core.config import PipelineConfig


def parts(name: str) -> tuple[str, ...]:
    """The devices that a name joins, in the order of the layers."""
    return tuple(name.split("+"))


def home(name: str) -> str:
    """The device where a target's inputs go, and where its outputs come from."""
    return parts(name)[0]


def all_devices(pipeline: PipelineConfig) -> tuple[str, ...]:
    """Every device that is used, once, targets first."""
    return tuple(dict.fromkeys(part for name in (*pipeline.targets, pipeline.drafter) for part in parts(name)))


def devices_of_rank(pipeline: PipelineConfig, rank: int) -> PipelineConfig:
    """The same with this rank's devices: rank 0 has those that are written, each further one as many CUDA devices later."""
    cuda = sum(device.startswith("cuda") for device in all_devices(pipeline))

    def later(device: str) -> str:
        kind, _, number = device.partition(":")
        return f"cuda:{int(number or 0) + rank * cuda}" if kind == "cuda" and rank else device

    targets = tuple("+".join(map(later, parts(name))) for name in pipeline.targets)
    return pipeline.model_copy(update={"targets": targets, "drafter": later(pipeline.drafter)})
