"""The stages as a graph, from the top down: who needs whom, and how long each took."""

from collections.abc import Mapping
from dataclasses import dataclass

import networkx as nx

from pipeline.report.run import StageFacts

WIDTH, HEIGHT = 124, 46  # of a box, in CSS pixels
GAP_X, GAP_Y = 16, 30


@dataclass(frozen=True)
class Box:
    """A stage on the drawing; x and y of its upper left corner."""

    stage: StageFacts
    x: float
    y: float


@dataclass(frozen=True)
class Drawing:
    """Boxes, and an arrow from the bottom of one to the top of another for each input that no other input implies."""

    boxes: list[Box]
    arrows: list[tuple[Box, Box]]
    width: float
    height: float


def drawing(stages: Mapping[str, StageFacts]) -> Drawing:
    """Each stage below all that it needs, rows centred."""
    graph = nx.DiGraph()
    graph.add_nodes_from(stages)
    graph.add_edges_from((source, name) for name, stage in stages.items() for source in stage.inputs)
    rows = list(nx.topological_generations(graph))
    width = max(len(row) for row in rows) * (WIDTH + GAP_X) - GAP_X
    boxes = {
        name: Box(
            stages[name],
            (width - len(row) * (WIDTH + GAP_X) + GAP_X) / 2 + place * (WIDTH + GAP_X),
            level * (HEIGHT + GAP_Y),
        )
        for level, row in enumerate(rows)
        for place, name in enumerate(row)
    }
    arrows = [(boxes[source], boxes[target]) for source, target in nx.transitive_reduction(graph).edges]
    return Drawing(list(boxes.values()), arrows, width, len(rows) * (HEIGHT + GAP_Y) - GAP_Y)
