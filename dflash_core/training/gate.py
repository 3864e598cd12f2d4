"""The one credit gate of the pipeline, in bytes of hidden states.

    plan --take, in order--> [ read, tap, order, train ] --give, when the step has consumed it--> plan

Every channel behind the gate has room for the whole window that the gate lets in, so a slow early batch never waits for room
held by later ones.
"""

from anyio import Event

MOST_AHEAD = 4096  # micro-batches behind the gate, whatever their bytes; also the room of every channel there


class CreditGate:
    """Bytes that micro-batches may hold between the gate and their step. Taken in plan order, by one task."""

    def __init__(self, budget: int) -> None:
        self.budget = self.free = budget
        self.closed = False
        self._inside = 0
        self._changed = Event()

    @property
    def held(self) -> int:
        """Bytes under credit."""
        return self.budget - self.free

    async def take(self, amount: int) -> bool:
        """Waits for `amount` bytes; False when the gate was closed. Raises ValueError for more than the whole budget."""
        if amount > self.budget:
            raise ValueError(f"a micro-batch of {amount} bytes is above pipeline.ahead_bytes {self.budget}; raise it")
        while not self.closed and (self.free < amount or self._inside >= MOST_AHEAD):
            self._changed = Event()
            await self._changed.wait()
        self.free -= amount
        self._inside += 1
        return not self.closed

    def give(self, amount: int) -> None:
        """Returns what a consumed micro-batch held."""
        self.free += amount
        self._inside -= 1
        self._changed.set()

    def close(self) -> None:
        """Nothing more is wanted."""
        self.closed = True
        self._changed.set()
