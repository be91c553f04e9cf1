"""A minimum cut over a directed graph whose every edge carries the reason it is there."""
from __future__ import annotations

from collections.abc import Hashable

import igraph

from jointtrace.errors import UnsupportedError

SOURCE = "source"
SINK = "sink"


class FlowGraph:
    """Edges from SOURCE to SINK. A capacity of None is an edge that must not be cut."""

    def __init__(self) -> None:
        self._index: dict[Hashable, int] = {SOURCE: 0, SINK: 1}
        self._edges: list[tuple[int, int]] = []
        self._capacities: list[int | None] = []
        self._reasons: list[str] = []

    def __contains__(self, node: Hashable) -> bool:
        return node in self._index

    def add(self, start: Hashable, end: Hashable, capacity: int | None, reason: str) -> None:
        """Add an edge."""
        index = self._index
        self._edges.append((index.setdefault(start, len(index)), index.setdefault(end, len(index))))
        self._capacities.append(capacity)
        self._reasons.append(reason)

    def sink_side(self) -> set[Hashable]:
        """Return the nodes on the sink's side of the minimum cut that is nearest to the sink.

        Raises:
            UnsupportedError: every cut goes through an edge that must not be cut; the message gives a chain of reasons.
        """
        total = sum(capacity for capacity in self._capacities if capacity is not None)
        capacities = [float(total + 1 if capacity is None else capacity) for capacity in self._capacities]
        graph = igraph.Graph(n=len(self._index), edges=self._edges, directed=True)
        flow = graph.maxflow(0, 1, capacity=capacities)
        if flow.value > total:
            raise UnsupportedError(f"what the backward needs can neither be kept nor computed again: "
                                   f"{self._conflict()}; change the checkpoint, or the policy, of one of them")
        # igraph takes the nodes from which the sink can still be reached: of all minimum cuts the nearest to the sink
        near = set(flow.partition[1])
        return {node for node, number in self._index.items() if number in near}

    def _conflict(self) -> str:
        fixed = [i for i, capacity in enumerate(self._capacities) if capacity is None]
        graph = igraph.Graph(n=len(self._index), edges=[self._edges[i] for i in fixed], directed=True)
        path = graph.get_shortest_path(0, 1, output="epath")
        return "; ".join(self._reasons[fixed[i]] for i in path)
