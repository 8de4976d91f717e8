"""Warpgroups, barriers and buffers that know what is surely done: for `pipeline_on_python`.

The operations of all warpgroups are carried out in an order drawn from a seed; copies land late, products run until
they are waited for. What is read or overwritten too early in some order is found in any, by vector clocks: a warpgroup
knows of each other one how much is surely done, and how many copies into each buffer. If also each round of a barrier
is surely waited for before the next one ends, barriers leave no choice: all orders do the same, and all end or none.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Clock = np.ndarray
NOTHING: Clock = np.zeros(1, int)


class ProtocolError(Exception):
    """The warpgroups may do in some order what they must not, or stand still."""


class Access:
    """A write or a read, and the time of a warpgroup (or the number of a copy into a buffer) at which it is done."""

    def __init__(self, who: str, component: int, end: float):
        self.who, self.component, self.end = who, component, end

    def done(self, clock: Clock) -> bool:
        return bool(clock[self.component] >= self.end)


class Buffer:
    """What one copy fills, or one part: its last write, and the reads since then."""

    def __init__(self, name: str, component: int):
        self.name, self.component, self.copies = name, component, 0
        self.holds: Any = None
        self.written, self.reads = Access("", component, 0), []

    def write(self, clock: Clock, access: Access, holds: Any) -> None:
        for other in (self.written, *self.reads):
            if not other.done(clock):
                raise ProtocolError(f"{access.who} writes {self.name} while {other.who} may still use it.")
        self.holds, self.written, self.reads = holds, access, []

    def known(self, clock: Clock) -> bool:
        return self.holds is not None and self.written.done(clock)

    def read(self, clock: Clock, access: Access) -> Any:
        if not self.known(clock):
            raise ProtocolError(f"{access.who} reads {self.name}, which may not be written yet.")
        self.reads.append(access)
        return self.holds


class Barrier:
    """Rounds of so many arrivals each; what is known once the last one has ended, and by those arrived since."""

    def __init__(self, name: str, arrivals: int):
        self.name, self.arrivals, self.arrived, self.rounds = name, arrivals, 0, 0
        self.last, self.clock = NOTHING, NOTHING
        self.waits: dict[Warpgroup, list[int]] = {}  # times at which those who wait for it have

    def arrive(self, clock: Clock) -> None:
        if not np.all(clock >= self.last):
            raise ProtocolError(f"An arrival for round {self.rounds + 1} of {self.name} may come before that begins.")
        self.arrived, self.clock = self.arrived + 1, np.maximum(self.clock, clock)
        if self.arrived < self.arrivals:
            return
        for warpgroup, times in self.waits.items():
            if len(times) < self.rounds or (times and self.clock[warpgroup.component] < times[-1]):
                raise ProtocolError(f"Round {self.rounds + 1} of {self.name} may end before {warpgroup.name} is there.")
        self.last, self.arrived, self.rounds = self.clock, 0, self.rounds + 1

    def wait(self, warpgroup: "Warpgroup") -> None:
        warpgroup.learn(self.last)
        self.waits[warpgroup].append(warpgroup.time())

    def check_end(self) -> None:
        waits = [len(times) for times in self.waits.values()]
        if self.arrived or any(n != self.rounds for n in waits) or (self.rounds and not waits):
            raise ProtocolError(f"{self.name} had {self.rounds} rounds, {self.arrived} arrivals more, waits: {waits}.")


class Signals:
    """A counter in global memory, waited for once."""

    def __init__(self) -> None:
        self.given, self.wanted, self.clock = 0, 0, NOTHING

    def signal(self, clock: Clock) -> None:
        self.given, self.clock = self.given + 1, np.maximum(self.clock, clock)

    def check_end(self) -> None:
        if self.given != self.wanted:
            raise ProtocolError(f"{self.given} signals were given where {self.wanted} are waited for.")


class Operation(NamedTuple):
    run: Callable[[], None]
    ready: Callable[[], bool]
    name: str


class Warpgroup:
    def __init__(self, block: int, number: int, component: int):
        self.name, self.block, self.number = f"warpgroup {number} of block {block}", block, number
        self.component, self.clock = component, NOTHING
        self.operations: deque[Operation] = deque()
        self.products: list[Access] = []  # that run

    def ready(self) -> bool:
        return bool(self.operations) and self.operations[0].ready()

    def step(self) -> None:
        self.clock[self.component] += 1
        self.operations.popleft().run()

    def time(self) -> int:
        return int(self.clock[self.component])

    def access(self, end: float | None = None) -> Access:
        return Access(self.name, self.component, self.time() if end is None else end)

    def learn(self, clock: Clock) -> None:
        self.clock = np.maximum(self.clock, clock)

    def wait_products(self, unfinished: int) -> None:
        while len(self.products) > unfinished:
            self.products.pop(0).end = self.time()

    def check_idle(self) -> None:
        if self.products:
            raise ProtocolError(f"A product of {self.name} runs where all have to be waited for.")


class CopyEngine:
    """Lands copies in any order."""

    def __init__(self, draw: random.Random):
        self.draw, self.copies = draw, []

    def copy(self, warpgroup: Warpgroup, buffer: Buffer, holds: Any, barrier: Barrier) -> None:
        buffer.copies += 1
        buffer.write(warpgroup.clock, Access("a copy", buffer.component, buffer.copies), holds)
        clock = warpgroup.clock.copy()
        clock[buffer.component] = buffer.copies
        self.copies.append(lambda: barrier.arrive(clock))

    def ready(self) -> bool:
        return bool(self.copies)

    def step(self) -> None:
        self.copies.pop(self.draw.randrange(len(self.copies)))()


def play(warpgroups: Sequence[Warpgroup], engine: CopyEngine, components: int) -> None:
    """Carries out everything that has been traced."""
    for warpgroup in warpgroups:
        warpgroup.clock = np.zeros(components, int)
    while left := [each for each in warpgroups if each.operations]:
        able = [actor for actor in (*left, engine) if actor.ready()]
        if not able:
            waits = "; ".join(f"{each.name}: {each.operations[0].name}" for each in left)
            raise ProtocolError(f"All stand still: {waits}.")
        actor = engine.draw.choice(able)
        for _ in range(engine.draw.choice((1, 2, 8, 64))):
            if actor.ready():
                actor.step()
    for warpgroup in warpgroups:
        warpgroup.check_idle()
