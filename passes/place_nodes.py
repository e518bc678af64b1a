"""Find when and at which stage every node of a lowered graph runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.errors import LoweringError

from .micro_batches import INDEX, completes
from .program import Input, Output, is_getitem, touches_generator
from .stage_pieces import BACKWARD, BEGIN, COMPLETE, END, FORWARD, TURN

_EVERYWHERE = frozenset({"input", "buffer", "tangent"})


@dataclass
class Placing:
    """When and where the nodes of a graph run.

    Attributes:
        when: node -> one of ``WHEN``; a total belongs to what runs after its loop.
        stage: node -> stage; the owner's for a parameter. Not for free nodes.
        free: nodes that read neither parameters nor random numbers: any stage computes them for itself.
        barrier: the backward reads a total of the forward.
    """

    when: dict[fx.Node, str] = field(default_factory=dict)
    stage: dict[fx.Node, int] = field(default_factory=dict)
    free: set[fx.Node] = field(default_factory=set)
    barrier: bool = False


def place_nodes(
    graph: fx.Graph,
    inputs: Sequence[Input],
    outputs: Sequence[Output],
    stages: Mapping[str, int],
    num_stages: int,
    again: Collection[fx.Node] = (),
    *,
    once: bool = False,
) -> Placing:
    """Return when and where every node of a lowered joint graph runs.

    Args:
        stages: name of a global forward op -> stage; nodes know theirs by ``meta["origin"]``.
        again: nodes that shall run once a micro-batch though they are the same in each (a parameter that is gathered
            for each use rather than kept).
        once: there is one micro-batch, which does all that reads parameters.

    Raises:
        LoweringError: a value would have to travel against the order of the stages.
    """
    placing = Placing()
    kinds = {role.node: role.kind for role in inputs}
    _set_free(graph, kinds, placing)
    loops = _all_but_totals(graph, placing) if once else _loops(graph, again)
    _set_when(graph, loops, placing)
    _place_forward(graph, kinds, stages, num_stages, placing)
    _place_backward(graph, stages, num_stages, _floors(graph, outputs, placing), placing)
    return placing


def _loops(graph: fx.Graph, again: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes that run once a micro-batch."""
    out: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if node.name == INDEX:
                out.add(node)
        elif not completes(node) and (touches_generator(node) or any(source in out for source in node.all_input_nodes)):
            out.add(node)
    below = set(again) - out
    for node in graph.nodes:
        once = node.op == "call_function" and node not in out and not completes(node)
        if once and any(source in below for source in node.all_input_nodes):
            below.add(node)
    for node in reversed(list(graph.nodes)):
        if node in below and node.users and all(user in out and user.op != "output" for user in node.users):
            out.add(node)
    return out


def _all_but_totals(graph: fx.Graph, placing: Placing) -> set[fx.Node]:
    """Return the nodes of the only micro-batch: all that any stage alone computes, up to the totals."""
    after: set[fx.Node] = set()
    out: set[fx.Node] = set()
    for node in graph.nodes:
        if completes(node) or any(source in after for source in node.all_input_nodes):
            after.add(node)
        elif node.op == "call_function" and node not in placing.free:
            out.add(node)
    return out


def _set_when(graph: fx.Graph, loops: set[fx.Node], placing: Placing) -> None:
    waits: dict[fx.Node, tuple[bool, bool]] = {}
    for node in graph.nodes:
        if node.op == "output":
            break
        late = node.meta.get("phase") == "backward"
        sources = node.all_input_nodes
        first = any(waits[source][0] for source in sources) or (completes(node) and not late)
        second = any(waits[source][1] for source in sources) or (completes(node) and late)
        waits[node] = first, second
        if node in loops and node.op != "placeholder":
            if second if late else first:
                raise LoweringError(
                    f"{node.name} runs once a micro-batch, but needs a total over all of them in the same phase"
                )
            placing.when[node] = BACKWARD if late else FORWARD
        elif late:
            placing.when[node] = END if second else TURN
        else:
            placing.when[node] = COMPLETE if first else BEGIN
        if late and first and not second:
            placing.barrier = True


def _set_free(graph: fx.Graph, kinds: Mapping[str, str], placing: Placing) -> None:
    for node in graph.nodes:
        if node.op == "placeholder":
            is_free = kinds.get(node.name) in _EVERYWHERE
        elif node.op == "output":
            is_free = False
        else:
            is_free = not touches_generator(node) and not completes(node)
            is_free = is_free and all(source in placing.free for source in node.all_input_nodes)
        if is_free:
            placing.free.add(node)


def _place_forward(
    graph: fx.Graph, kinds: Mapping[str, str], stages: Mapping[str, int], num_stages: int, placing: Placing
) -> None:
    own = [n for n in graph.nodes if _placed(n, placing) and n.meta.get("phase") != "backward"]
    stage = placing.stage
    for node in reversed(own):
        below = [stage[user] for user in node.users if user in stage and user.meta.get("phase") != "backward"]
        if node.op == "placeholder":
            stage[node] = min(below, default=num_stages - 1)
        elif is_getitem(node) or completes(node):
            continue  # it goes with what it reads
        elif "arc" in node.meta or node.meta.get("origin") not in stages:
            if below:
                stage[node] = min(below)
        else:
            stage[node] = stages[node.meta["origin"]]
        if node in stage and below and stage[node] > min(below):
            raise LoweringError(f"{node.name} is of stage {stage[node]}, but stage {min(below)} reads it")
    for node in own:
        sources = [stage[source] for source in node.all_input_nodes if source in stage]
        if node.op == "placeholder":
            continue
        if is_getitem(node) or completes(node):
            stage[node] = max(sources, default=num_stages - 1)
        elif node not in stage:
            stage[node] = max(sources, default=0)
        elif sources and stage[node] < max(sources):
            stage[node] = max(sources)


def _floors(graph: fx.Graph, outputs: Sequence[Output], placing: Placing) -> dict[fx.Node, int]:
    """Return the least stage of backward nodes: gradients flow down, to the stage that keeps the parameter."""
    keeps = {node.name: stage for node, stage in placing.stage.items() if node.op == "placeholder"}
    output = graph.output_node()
    floors: dict[fx.Node, int] = {}
    for role, end in zip(outputs, output.args[0]):  # type: ignore[arg-type]
        if role.kind == "gradient" and isinstance(end, fx.Node):
            floors[end] = max(floors.get(end, 0), keeps.get(role.of, 0))
    for node in reversed(list(graph.nodes)):
        for source in node.all_input_nodes if node in floors else ():
            floors[source] = max(floors.get(source, 0), floors[node])
    return floors


def _place_backward(
    graph: fx.Graph,
    stages: Mapping[str, int],
    num_stages: int,
    floors: Mapping[fx.Node, int],
    placing: Placing,
) -> None:
    own = [n for n in graph.nodes if _placed(n, placing) and n.meta.get("phase") == "backward"]
    stage = placing.stage
    later: list[fx.Node] = []
    for node in own:
        before = [s for s in node.all_input_nodes if s in stage and s.meta.get("phase") == "backward"]
        if is_getitem(node):
            if before:
                stage[node] = stage[before[0]]
            else:
                later.append(node)
            continue
        if not before and any(user not in placing.free for user in node.users) and _home(node, stages) is None:
            later.append(node)
            continue
        high = min((stage[source] for source in before), default=num_stages - 1)
        saved = [stage[s] for s in node.all_input_nodes if s in stage and s.meta.get("phase") != "backward"]
        home = _home(node, stages)
        wanted = high if home is None or completes(node) else home
        stage[node] = min(max([wanted, floors.get(node, 0), *saved]), high)
    for node in reversed(later):
        users = [stage[user] for user in node.users if user in stage]
        saved = [stage[s] for s in node.all_input_nodes if s in stage and s.meta.get("phase") != "backward"]
        stage[node] = max([*(users or saved or [num_stages - 1]), floors.get(node, 0)])
    for node in own:
        if is_getitem(node) and node.args[0] in stage:
            stage[node] = stage[node.args[0]]  # type: ignore[index]


def _home(node: fx.Node, stages: Mapping[str, int]) -> int | None:
    again = node.meta.get("again", False)  # a forward op that is computed once more
    return stages.get(str(node.meta.get("origin" if again else "forward_node", "")))


def _placed(node: fx.Node, placing: Placing) -> bool:
    return node.op != "output" and node not in placing.free
