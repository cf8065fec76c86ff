"""The lineage of a file as a drawing: stages in layers, the file at the bottom, arrows along what each one read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import networkx

from pipeline.lineage.whence import Origin, Step

TITLE_CHAR, CHAR, LINE = 7.6, 6.4, 16
"""Width of a character in a box's title and below it, and height of a line, in SVG units."""
GAP_X, GAP_Y, PAD = 18, 34, 10
SWEEPS = 8

Node = Any
"""A stage's name, `("source", path)`, or a place where a long arrow passes a layer."""


@dataclass(frozen=True, slots=True)
class Box:
    """A stage or a source."""

    kind: str
    title: str
    lines: tuple[str, ...]
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Drawing:
    """Boxes and the paths of arrows, in SVG units."""

    width: float
    height: float
    boxes: list[Box]
    arrows: list[tuple[str, bool]]
    """Each with whether it ends at a box."""


def draw(origin: Origin) -> Drawing:
    """Sources on top, the file at the bottom. An arrow that follows from others is left out."""
    graph, texts = _graph(origin)
    layers, edges = _layers(graph)
    _untangle(layers, edges)
    widths = {node: _width(texts[node]) if node in texts else 8.0 for layer in layers for node in layer}
    centres = _across(layers, edges, widths)
    left = min(centres[node] - widths[node] / 2 for node in widths)
    right = max(centres[node] + widths[node] / 2 for node in widths)
    heights = [max(LINE * len(texts[node]) + PAD for node in layer if node in texts) for layer in layers]
    tops = [sum(heights[:index]) + GAP_Y * index + 1 for index in range(len(layers))]
    spans = {node: (tops[index], tops[index] + heights[index]) for index, layer in enumerate(layers) for node in layer}
    last = origin.steps[-1].stage
    boxes = [
        Box(
            kind="file" if node == last else "source" if isinstance(node, tuple) else "stage",
            title=text[0],
            lines=text[1:],
            x=round(centres[node] - widths[node] / 2 - left + 1, 1),
            y=spans[node][0],
            width=round(widths[node], 1),
            height=LINE * len(text) + PAD,
        )
        for node, text in texts.items()
    ]
    arrows = [(_arrow(tail, head, centres, spans, texts, left - 1), head in texts) for tail, head in edges]
    return Drawing(round(right - left + 2, 1), tops[-1] + heights[-1] + 2, boxes, arrows)


def _graph(origin: Origin) -> tuple[networkx.DiGraph, dict[Node, tuple[str, ...]]]:
    """The transitive reduction of who read what, and the lines of text of every box."""
    graph = networkx.DiGraph()
    texts: dict[Node, tuple[str, ...]] = {}
    writers = {out: step.stage for step in origin.steps for out in step.outs.items()}
    for step in origin.steps:
        graph.add_node(step.stage)
        texts[step.stage] = _text(step, origin)
        for path, md5 in step.deps.items():
            tail = writers.get((path, md5), ("source", path))
            graph.add_edge(tail, step.stage)
            if isinstance(tail, tuple):
                texts[tail] = (path, md5[:7])
    return networkx.transitive_reduction(graph), texts


def _text(step: Step, origin: Origin) -> tuple[str, ...]:
    if step is origin.steps[-1]:
        return step.stage, origin.path, origin.digest[:7]
    path, md5 = next(iter(sorted(step.outs.items(), key=lambda out: _is_minor(out[0]))))
    return step.stage, f"{path} {md5[:7]}"


def _width(text: Sequence[str]) -> float:
    return max(TITLE_CHAR * len(text[0]), CHAR * max(map(len, text))) + 2 * PAD


def _is_minor(path: str) -> bool:
    return path.startswith(("metrics/", "plots/")) or path.endswith(".json")


def _layers(graph: networkx.DiGraph) -> tuple[list[list[Node]], list[tuple[Node, Node]]]:
    """Every node as low as its readers allow, and long edges cut into one per layer."""
    layers = [list(layer) for layer in networkx.topological_generations(graph.reverse())][::-1]
    depth = {node: index for index, layer in enumerate(layers) for node in layer}
    edges: list[tuple[Node, Node]] = []
    for tail, head in graph.edges:
        chain = [tail, *((tail, head, index) for index in range(depth[tail] + 1, depth[head])), head]
        for node, index in zip(chain[1:-1], range(depth[tail] + 1, depth[head]), strict=True):
            layers[index].append(node)
        edges += zip(chain, chain[1:], strict=False)
    return layers, edges


def _untangle(layers: list[list[Node]], edges: Sequence[tuple[Node, Node]]) -> None:
    """Orders each layer by where its neighbours stand (Sugiyama 1981), down and up again."""
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        order = layers if down else layers[::-1]
        for fixed, layer in zip(order, order[1:], strict=False):
            place = {node: index for index, node in enumerate(fixed)}
            means = {node: _mean(place, _neighbours(node, edges, down), layer.index(node)) for node in layer}
            layer.sort(key=means.__getitem__)


def _neighbours(node: Node, edges: Iterable[tuple[Node, Node]], above: bool) -> list[Node]:
    return [tail if above else head for tail, head in edges if (head if above else tail) == node]


def _mean(place: Mapping[Node, float], nodes: Sequence[Node], otherwise: float) -> float:
    return sum(place[node] for node in nodes) / len(nodes) if nodes else otherwise


def _across(
    layers: Sequence[Sequence[Node]], edges: Sequence[tuple[Node, Node]], widths: Mapping[Node, float]
) -> dict[Node, float]:
    """Centres: each node as near to its neighbours as those beside it let it be."""
    centres: dict[Node, float] = {}
    for layer in layers:
        centres |= _spaced(layer, dict.fromkeys(layer, 0.0), widths)
    for sweep in range(SWEEPS):
        for layer in layers if sweep % 2 == 0 else layers[::-1]:
            wanted = {node: _mean(centres, _neighbours(node, edges, sweep % 2 == 0), centres[node]) for node in layer}
            centres |= _spaced(layer, wanted, widths)
    return centres


def _spaced(layer: Sequence[Node], wanted: Mapping[Node, float], widths: Mapping[Node, float]) -> dict[Node, float]:
    """The wanted places, pushed apart, and then moved together so that on average nobody was."""
    found: dict[Node, float] = {}
    end = float("-inf")
    for node in layer:
        found[node] = max(wanted[node], end + widths[node] / 2)
        end = found[node] + widths[node] / 2 + GAP_X
    shift = sum(wanted[node] - found[node] for node in layer) / len(layer)
    return {node: centre + shift for node, centre in found.items()}


def _arrow(
    tail: Node,
    head: Node,
    centres: Mapping[Node, float],
    spans: Mapping[Node, tuple[float, float]],
    texts: Mapping[Node, Sequence[str]],
    left: float,
) -> str:
    """A curve from below `tail` to above `head`; one that only passes a layer goes straight through it."""
    top, bottom = spans[tail]
    start = top + LINE * len(texts[tail]) + PAD if tail in texts else bottom
    x, y, end = round(centres[tail] - left, 1), round(centres[head] - left, 1), spans[head][0]
    middle = round((start + end) / 2, 1)
    through = "" if head in texts else f"V{spans[head][1]}"
    return f"M{x} {start}C{x} {middle} {y} {middle} {y} {end}{through}"
