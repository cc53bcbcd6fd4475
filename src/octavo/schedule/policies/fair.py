"""Fair shares of tokens among clients, by virtual-time counters (Sheng et al., "Fairness in Serving
Large Language Models", OSDI 2024: VTC).

Each client has a counter of what it was served, divided by its weight: a token of prompt counts 1
when its request is let in, a token of output ``output_cost`` when it is drawn. Not charged are
prompt tokens that lie in the prefix cache, which cost nothing, and tokens computed again after a
preemption, which was not the client's wish. Then:

- Next is the first request of the client whose counter is least. Nobody's share is left unused:
  somebody who waits is let in whenever there is room.
- A client with nothing in the queue that comes back is lifted to the least counter of those in the
  queue, or, if there are none, to that of the client who left it last: nobody saves up for later.
- Between clients that have work in the queue all along, what they were served differs by no more
  than 2 × max(longest prompt, ``output_cost`` × tokens of the pool), in whatever stretch of time
  (the paper's theorem 4.4).

The paper lets a running request be. Here it gives its place to the next in line when its client is
ahead of the other's by more than twice what it costs to compute its tokens again, so that who asks
little does not wait for the long answers of who asks much; and each exchange has had more service
between it and the last than it costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from heapq import heappop, heappush, heapreplace

from octavo.schedule.policies.base import Line, Policy
from octavo.schedule.policies.fcfs import BY_ARRIVAL
from octavo.schedule.sequence import RequestState, Sequence

_EXCHANGE = 2.0  # times the tokens of a running sequence, that its client must be ahead
_KNOWN = 1024  # clients, before those that have nothing to their debit are forgotten


class _Client:
    __slots__ = ("counter", "in_heap", "line")

    def __init__(self, counter: float) -> None:
        self.counter = counter
        self.line = Line(BY_ARRIVAL)
        self.in_heap = False


class Fair(Policy):
    def __init__(self, output_cost: float) -> None:
        """``output_cost``: of a token of output, in tokens of prompt."""
        self._output_cost = output_cost
        self._clients: dict[str, _Client] = {}
        self._known = _KNOWN
        # Those in the queue. Counters only grow, so a client's true place is not before its entry.
        self._heap: list[tuple[float, int, _Client]] = []
        self._joined = 0
        self._last = _Client(0.0)  # who left the queue last
        self._size = 0

    def push(self, seq: Sequence) -> None:
        client = self._of(seq)
        if not client.line:
            client.counter = max(client.counter, self._level())
        client.line.push(seq)
        self._size += 1
        if not client.in_heap:
            self._joined += 1
            heappush(self._heap, (client.counter, self._joined, client))
            client.in_heap = True

    def remove(self, seq: Sequence) -> None:
        client = self._of(seq)
        client.line.remove(seq)
        self._size -= 1
        if not client.line:
            self._last = client

    def clear(self) -> None:
        waiting = [client.counter for client in self._clients.values() if client.line]
        if waiting:  # so that nobody is lifted who comes straight back
            self._last = _Client(min(waiting))
        for client in self._clients.values():
            client.line.clear()
            client.in_heap = False
        self._heap.clear()
        self._size = 0

    def head(self) -> Sequence | None:
        first = self._least()
        return None if first is None else first.line.first

    def displaces(self, challenger: Sequence, running: Sequence) -> bool:
        ahead = self._of(running).counter - self._of(challenger).counter
        cost = len(running.token_ids) / running.owner.request.weight
        return ahead > _EXCHANGE * cost

    def rank(self, seq: Sequence) -> tuple[float, tuple[int, int]]:
        return self._of(seq).counter, seq.order

    def begins(self, state: RequestState, num_computed: int) -> None:
        self._of(state.sequences[0]).counter += num_computed / state.request.weight

    def drew(self, seqs: Items[Sequence], counts: Iterable[int]) -> None:
        for seq, count in zip(seqs, counts, strict=False):
            self._of(seq).counter += self._output_cost * count / seq.owner.request.weight

    def served(self, name: str) -> float:
        """A client's counter: tokens of prompt by its weight."""
        return self._clients[name].counter if name in self._clients else self._level()

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        for client in self._clients.values():
            yield from client.line

    def _of(self, seq: Sequence) -> _Client:
        name = seq.owner.request.client
        client = self._clients.get(name)
        return self._open(name) if client is None else client

    def _open(self, name: str) -> _Client:
        if len(self._clients) >= self._known:
            # They would be lifted to the level when they come back.
            level = self._level()
            self._clients = {
                name: client
                for name, client in self._clients.items()
                if client.line or client.counter > level
            }
            self._known = max(_KNOWN, 2 * len(self._clients))
        client = self._clients[name] = _Client(self._level())
        return client

    def _least(self) -> _Client | None:
        """Of those in the queue, who was served least."""
        heap = self._heap
        while heap:
            counter, joined, client = heap[0]
            if not client.line:
                heappop(heap)
                client.in_heap = False
            elif client.counter > counter:
                heapreplace(heap, (client.counter, joined, client))
            else:
                return client
        return None

    def _level(self) -> float:
        """Where a client begins that comes to the queue."""
        return (self._least() or self._last).counter
