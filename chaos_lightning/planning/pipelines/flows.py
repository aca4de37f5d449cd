"""Finds minimum-cost flows through a small network, exactly, in whole numbers of any size.

Theory of operation. Successive shortest paths: each is found by Dijkstra's algorithm on costs that potentials have made
non-negative, and takes as much as fits. A search ends at the sink, so it sees a small part of the network. With costs
of zero this is the largest flow, and what a search that found no way has reached is a side of a cut that is full. Costs
may have hundreds of digits, so that one number orders several goals.
"""

from __future__ import annotations

from heapq import heappop, heappush


class FlowNetwork:
    """Flow network: arcs with capacities and costs.

    Args:
        nodes: Number of nodes; they are numbered from 0.
    """

    def __init__(self, nodes: int) -> None:
        self._out: list[list[int]] = [[] for _ in range(nodes)]
        self._head: list[int] = []
        self._cost: list[int] = []
        self._left: list[int] = []
        self._potential = [0] * nodes
        self.reached: set[int] = set()
        """Nodes that the last search of `send` came to."""

    def arc(self, tail: int, head: int, capacity: int, cost: int = 0) -> int:
        """Adds an arc with a cost that is not negative; returns its number."""
        number = len(self._head)
        self._head += [head, tail]
        self._cost += [cost, -cost]
        self._left += [capacity, 0]
        self._out[tail].append(number)
        self._out[head].append(number + 1)
        return number

    def widen(self, arc: int, by: int) -> None:
        """Raises the capacity of an arc; flow that was sent before stays the cheapest only if costs are zero."""
        self._left[arc] += by

    def sent(self, arc: int) -> int:
        return self._left[arc ^ 1]

    def send(self, source: int, sink: int, most: int) -> int:
        """Sends up to `most` more units of flow at the least cost; returns how many could be sent.

        Several sources are served one after the other: each takes up what others have sent where that is cheaper in
        all, so that the whole flow is the cheapest. All of them send to the same sink.
        """
        left = most
        while left and (path := self._path(source, sink)) is not None:
            amount = min(left, *(self._left[a] for a in path))
            for a in path:
                self._left[a] -= amount
                self._left[a ^ 1] += amount
            left -= amount
        return most - left

    def _path(self, source: int, sink: int) -> list[int] | None:
        head, left, cost, potential = self._head, self._left, self._cost, self._potential
        distance, by = {source: 0}, {source: -1}
        done: dict[int, int] = {}
        heap = [(0, source)]
        while heap and sink not in done:
            d, node = heappop(heap)
            if node in done:
                continue
            done[node] = d
            d += potential[node]
            for a in self._out[node]:
                to = head[a]
                if left[a] and to not in done:
                    further = d + cost[a] - potential[to]
                    if to not in distance or further < distance[to]:
                        distance[to], by[to] = further, a
                        heappush(heap, (further, to))
        self.reached = set(done)
        if sink not in done:
            return None
        for node, d in done.items():
            potential[node] -= done[sink] - d
        path, node = [], sink
        while node != source:
            path.append(by[node])
            node = head[by[node] ^ 1]
        return path
