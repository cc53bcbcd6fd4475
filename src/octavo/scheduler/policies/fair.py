"""Fair shares of tokens among clients, by virtual-time counters (Sheng et al., "Fairness in Serving
Large Language Models", OSDI 2024: VTC).

Each client has a counter of what it was served, divided by its weight: a token of prompt counts 1
when its request is admitted, a token of output ``fair_output_cost`` when it is drawn. Not charged
are prompt tokens that are in the prefix cache, which cost nothing, and tokens computed again after
a preemption, which the client did not ask for. Rules:

- Next is the first request of the client with the lowest counter. No capacity is left unused: a
  waiting request is admitted whenever there is capacity for it.
- A client that comes back to the queue is raised to the lowest counter of the clients in the queue
  or, if there are none, of the client that left it last: so no client saves up for later.
- Between two clients that always have requests in the queue, what they were served differs at any
  time by at most e of the one and e of the other, where e is (longest prompt +
  ``fair_output_cost`` × ``max_num_seqs`` × longest answer) / weight: what a client may still be
  given after it was admitted with the lowest counter (the paper's theorem 4.4, whose bound is the
  tokens of the cache; derived in tests/scheduler/test_policies.py). A client whose queue is empty
  for a moment has all it asked for: it is raised, and what it lagged behind by then is not owed to
  it.

The paper never preempts. Here a running request is preempted for the next in the queue when its
client is ahead of the other by more than twice what it costs to compute its tokens again, so that
a client with short requests does not wait for the long answers of another. Between two such
preemptions more is served than each of them costs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from functools import lru_cache
from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Any

from octavo.scheduler.policies.base import Policy, SortedQueue

if TYPE_CHECKING:
    from octavo.scheduler.request import RequestRecord
    from octavo.scheduler.sequence import Sequence

_PREEMPTION_COST = 2.0  # times the tokens of a running sequence by which its client must be ahead
_UNIT = 1 << 20  # of counters, per prompt token of a client of weight 1. Counters are whole
# numbers, so that tokens add up to the same in whatever portions they are counted.
_KNOWN = 1024  # clients, before those that owe nothing are forgotten


class _Client:
    __slots__ = ("counter", "in_heap", "queue")

    def __init__(self, counter: int) -> None:
        self.counter = counter
        self.queue = SortedQueue()
        self.in_heap = False


@lru_cache(64)
def _charge(cost: float, weight: float) -> int:
    """Return what a token adds to its client's counter."""
    return max(1, round(_UNIT * cost / weight))


class Fair(Policy):
    name = "fair"
    help = "equal shares for clients"
    request_fields = frozenset({"weight"})
    by_client = True
    preempts = True
    replaces = True

    def __init__(self, fair_output_cost: float = 2.0) -> None:
        """``fair_output_cost``: of a token of output, in tokens of prompt."""
        self._output_cost = fair_output_cost
        self._clients: dict[str, _Client] = {}
        self._known = _KNOWN
        # The clients in the queue. Counters only grow, so a client's turn is not before its entry.
        self._heap: list[tuple[int, int, _Client]] = []
        self._joined = 0
        self._last = _Client(0)  # the client that left the queue last

    def push(self, seq: Sequence) -> None:
        client = self._of(seq)
        if not client.queue:
            client.counter = max(client.counter, self._level())
        client.queue.push(seq)
        if not client.in_heap:
            self._joined += 1
            heappush(self._heap, (client.counter, self._joined, client))
            client.in_heap = True

    def remove(self, seq: Sequence) -> None:
        client = self._of(seq)
        client.queue.remove(seq)
        if not client.queue:
            self._last = client

    def clear(self) -> None:
        waiting = [client.counter for client in self._clients.values() if client.queue]
        if waiting:  # so that clients that come straight back are not raised
            self._last = _Client(min(waiting))
        for client in self._clients.values():
            client.queue.clear()
            client.in_heap = False
        self._heap.clear()

    def head(self) -> Sequence | None:
        first = self._least()
        return None if first is None else first.queue.first

    def in_turn(self) -> Iterator[Sequence]:
        """Iterate as if nothing of their prompts were cached."""
        # Open the heap's entries from its top down, and place clients by their present counters:
        # the result is that of a heap of all.
        entries = self._heap
        heap: list[tuple[int, int, int, Iterator[Sequence] | None]] = []

        def reach(index: int) -> None:
            if index < len(entries):
                counter, joined, _ = entries[index]
                heappush(heap, (counter, joined, index, None))

        reach(0)
        begun: set[str] = set()  # requests of which a sequence has been yielded
        while heap:
            counter, joined, index, queue = heap[0]
            if queue is None:
                client = entries[index][2]
                heapreplace(heap, (client.counter, joined, index, iter(client.queue)))
                reach(2 * index + 1)
                reach(2 * index + 2)
                continue
            seq = next(queue, None)
            if seq is None:
                heappop(heap)
                continue
            yield seq
            owner = seq.owner
            if owner.scheduled is None and owner.request_id not in begun:
                begun.add(owner.request_id)
                counter += owner.prompt_tokens * _charge(1.0, owner.scheduling.weight)
                heapreplace(heap, (counter, joined, index, queue))

    def rank(self, seq: Sequence) -> Any:
        return self._of(seq).counter, seq.order

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        ahead = self._of(running).counter - self._of(waiting).counter
        again = len(running.token_ids) * _charge(1.0, running.owner.scheduling.weight)
        return ahead > _PREEMPTION_COST * again

    def replaced(
        self,
        newcomer: RequestRecord | None,
        waiting: Iterator[RequestRecord],
        joining: Items[RequestRecord] = (),
    ) -> RequestRecord | None:
        """Return the latest request of the client that has most waiting for its weight, if the
        newcomer's client has less even with it and with those that join together with it.
        """
        shares: defaultdict[str, float] = defaultdict(float)
        latest: dict[str, RequestRecord] = {}
        for record in waiting:
            asked = record.scheduling
            shares[asked.client] += 1 / asked.weight
            latest.setdefault(asked.client, record)
        if not shares:
            return None
        for record in joining:
            shares[record.scheduling.client] += 1 / record.scheduling.weight
        most = max(shares, key=shares.__getitem__)
        if newcomer is not None:
            asked = newcomer.scheduling
            own = shares.get(asked.client, 0.0) + 1 / asked.weight
            if own >= shares[most] or asked.client == most:
                return None
        return latest.get(most)

    def ahead_of(self, record: RequestRecord) -> list[Sequence]:
        """Clients take turns: of each client as many come before as the newcomer's has waiting."""
        queue = [(seq, seq.owner.scheduling.client) for seq in self]
        counts = Counter(client for _, client in queue)
        turn = counts[record.scheduling.client] + 1
        before = []
        for seq, client in queue:
            counts[client] -= 1
            if counts[client] < turn:
                before.append(seq)
        return before

    def on_admit(self, record: RequestRecord, num_computed: int) -> None:
        charge = _charge(1.0, record.scheduling.weight)
        self._of(record.sequences[0]).counter += num_computed * charge

    def on_tokens(self, seqs: Items[Sequence], counts: Iterable[int]) -> None:
        for seq, count in zip(seqs, counts, strict=False):
            charge = _charge(self._output_cost, seq.owner.scheduling.weight)
            self._of(seq).counter += count * charge

    def served(self, name: str) -> float:
        """Return a client's counter, in tokens of prompt by its weight."""
        client = self._clients.get(name)
        return (self._level() if client is None else client.counter) / _UNIT

    def __iter__(self) -> Iterator[Sequence]:
        for client in self._clients.values():
            yield from client.queue

    def _of(self, seq: Sequence) -> _Client:
        name = seq.owner.scheduling.client
        client = self._clients.get(name)
        return self._open(name) if client is None else client

    def _open(self, name: str) -> _Client:
        if len(self._clients) >= self._known:
            # Those at the level or below would be raised to it when they come back.
            level = self._level()
            self._clients = {
                name: client
                for name, client in self._clients.items()
                if client.queue or client.counter > level
            }
            self._known = max(_KNOWN, 2 * len(self._clients))
        client = self._clients[name] = _Client(self._level())
        return client

    def _least(self) -> _Client | None:
        """Return the client in the queue that was served least."""
        heap = self._heap
        while heap:
            counter, joined, client = heap[0]
            if not client.queue:
                heappop(heap)
                client.in_heap = False
            elif client.counter > counter:
                heapreplace(heap, (client.counter, joined, client))
            else:
                return client
        return None

    def _level(self) -> int:
        """Return the counter from which a client that comes to the queue starts."""
        return (self._least() or self._last).counter
