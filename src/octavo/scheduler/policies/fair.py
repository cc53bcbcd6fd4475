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
- Between two clients that have work in the queue all along, what they were served differs by no
  more than e of the one and e of the other, in whatever stretch of time, where e is (longest prompt
  + ``output_cost`` × ``max_num_seqs`` × longest answer) / weight: what a client may still be given
  after it was let in with the least counter (the paper's theorem 4.4, whose bound is the tokens
  of the cache; derived in tests/scheduler/test_policies.py). A client whose queue is empty
  for a moment has all it asked for: it is lifted, and what it was behind then is not owed to it.

The paper lets a running request be. Here it gives its place to the next in line when its client is
ahead of the other's by more than twice what it costs to compute its tokens again, so that who asks
little does not wait for the long answers of who asks much; and each exchange has had more service
between it and the last than it costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from functools import lru_cache
from heapq import heappop, heappush, heapreplace

from octavo.scheduler.policies.base import BY_ARRIVAL, Line, Policy
from octavo.scheduler.sequence import RequestState, Sequence

_EXCHANGE = 2.0  # times the tokens of a running sequence, that its client must be ahead
_UNIT = 1 << 20  # of counters, in a token of prompt of a client of weight 1. They are whole
# numbers, so that in whatever portions tokens are counted, they add up to the same.
_KNOWN = 1024  # clients, before those that have nothing to their debit are forgotten


class _Client:
    __slots__ = ("counter", "in_heap", "line")

    def __init__(self, counter: int) -> None:
        self.counter = counter
        self.line = Line(BY_ARRIVAL)
        self.in_heap = False


@lru_cache(64)
def _charge(cost: float, weight: float) -> int:
    """For a token."""
    return max(1, round(_UNIT * cost / weight))


class Fair(Policy):
    def __init__(self, output_cost: float) -> None:
        """``output_cost``: of a token of output, in tokens of prompt."""
        self._output_cost = output_cost
        self._clients: dict[str, _Client] = {}
        self._known = _KNOWN
        # Those in the queue. Counters only grow, so a client's true place is not before its entry.
        self._heap: list[tuple[int, int, _Client]] = []
        self._joined = 0
        self._last = _Client(0)  # who left the queue last
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

    def in_turn(self) -> Iterator[Sequence]:
        """As if nothing of their prompts were cached."""
        # The heap's entries are opened from its top down, and clients are placed by what they are
        # charged by now: as in a heap of all.
        entries = self._heap
        heap: list[tuple[int, int, int, Iterator[Sequence] | None]] = []

        def reach(index: int) -> None:
            if index < len(entries):
                counter, joined, _ = entries[index]
                heappush(heap, (counter, joined, index, None))

        reach(0)
        begun: set[int] = set()  # requests, of which one sequence has been
        while heap:
            counter, joined, index, line = heap[0]
            if line is None:
                client = entries[index][2]
                heapreplace(heap, (client.counter, joined, index, iter(client.line)))
                reach(2 * index + 1)
                reach(2 * index + 2)
                continue
            seq = next(line, None)
            if seq is None:
                heappop(heap)
                continue
            yield seq
            owner = seq.owner
            if owner.record.scheduled is None and id(owner) not in begun:
                begun.add(id(owner))
                counter += owner.num_prompt_tokens * _charge(1.0, owner.request.weight)
                heapreplace(heap, (counter, joined, index, line))

    def displaces(self, challenger: Sequence, running: Sequence) -> bool:
        ahead = self._of(running).counter - self._of(challenger).counter
        again = len(running.token_ids) * _charge(1.0, running.owner.request.weight)
        return ahead > _EXCHANGE * again

    def rank(self, seq: Sequence) -> tuple[int, tuple[int, int]]:
        return self._of(seq).counter, seq.order

    def begins(self, state: RequestState, num_computed: int) -> None:
        charge = _charge(1.0, state.request.weight)
        self._of(state.sequences[0]).counter += num_computed * charge

    def drew(self, seqs: Items[Sequence], counts: Iterable[int]) -> None:
        for seq, count in zip(seqs, counts, strict=False):
            charge = _charge(self._output_cost, seq.owner.request.weight)
            self._of(seq).counter += count * charge

    def served(self, name: str) -> float:
        """A client's counter, in tokens of prompt by its weight."""
        client = self._clients.get(name)
        return (self._level() if client is None else client.counter) / _UNIT

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

    def _level(self) -> int:
        """Where a client begins that comes to the queue."""
        return (self._least() or self._last).counter
