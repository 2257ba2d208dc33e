"""The matcher: patterns are data, read from a result back to its inputs.

A pattern is one of
    Var(name)               any tensor; the same name is the same tensor (or an equal constant) everywhere
    Const(value | name)     a constant of one element, of a value or bound to a name
    Op(kind, *args)         the first output of such a node; args are patterns for its first inputs
    Alt(*patterns)          the first of them that leads to a whole match
    Tag(key, word, p)       p, and the match remembers which spelling it took
A match is void if a tensor inside it is read outside or is an output of the graph, unless the fused op gives
it back. Add and Mul match in either order. Nodes of one match are of one graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import onnx_graphsurgeon as gs
from onnx import TensorProto

from trtfuse.view import INSIDE, View, kind

COMMUTATIVE = frozenset({"Add", "Mul", "Max", "Min", "And", "Or"})
# How far a constant may be from the value of its formula, by the type it is written in: a few units in the
# last place of that type, so that 1.4142 written in fp16 is sqrt(2) and 1.4137 in fp32 is not.
TOLERANCE: dict[int, float] = {
    TensorProto.FLOAT16: 1e-3,
    TensorProto.BFLOAT16: 8e-3,
    TensorProto.DOUBLE: 1e-6,
}
DEFAULT_TOLERANCE = 1e-6
WHOLE = 100  # nodes: as deep as a failed condition of an operator that is the fused op by itself

UNTOLD = ""  # the reason of a condition whose failing is no near-miss

Where = Callable[[gs.Node, View], "str | None"]  # None: holds; else the reason why not


@dataclass(frozen=True, eq=False)
class Var:
    """`where` judges a tensor before it is bound, so that hopeless ways end early: None or a reason."""

    name: str
    where: Callable[[gs.Tensor, View], str | None] | None = None


@dataclass(frozen=True)
class Const:
    value: float | None = None
    name: str | None = None
    says: str = ""  # how a person writes the value: "sqrt(2)"


@dataclass(frozen=True, eq=False)
class Op:
    """`where` judges the node (None or a reason); `name` binds its output; `rest`: more inputs are allowed.

    extra: names for the outputs after the first, None for those that must not be read.
    whole: the operator is the fused op by itself, so that a condition that fails is always worth telling.
    """

    kind: str
    args: tuple[Pattern, ...]
    where: Where | None = None
    name: str | None = None
    rest: bool = False
    extra: tuple[str | None, ...] = ()
    whole: bool = False

    def __init__(
        self,
        kind: str,
        *args: Pattern,
        where: Where | None = None,
        name: str | None = None,
        rest: bool = False,
        extra: tuple[str | None, ...] = (),
        whole: bool = False,
    ):
        values: dict[str, object] = {"kind": kind, "args": args, "where": where, "name": name, "rest": rest}
        values |= {"extra": extra, "whole": whole}
        for k, v in values.items():
            object.__setattr__(self, k, v)


@dataclass(frozen=True, eq=False)
class Alt:
    options: tuple[Pattern, ...]

    def __init__(self, *options: Pattern):
        object.__setattr__(self, "options", options)


@dataclass(frozen=True, eq=False)
class Tag:
    key: str
    word: str
    pattern: Pattern


Pattern = Var | Const | Op | Alt | Tag


@dataclass(frozen=True)
class Match:
    """What was found: tensors, constants and spellings by name, and the nodes, root first."""

    root: gs.Node | None = None
    tensors: dict[str, gs.Tensor] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    nodes: tuple[gs.Node, ...] = ()
    tags: dict[str, str] = field(default_factory=dict)
    seen: dict[int, gs.Tensor] = field(default_factory=dict)

    def bind(self, name: str, tensor: gs.Tensor) -> Match:
        tensors = {**self.tensors, name: tensor}
        return Match(self.root, tensors, self.values, self.nodes, self.tags, self.seen)

    def set(self, name: str, value: float) -> Match:
        return replace(self, values={**self.values, name: value})

    def tag(self, key: str, word: str) -> Match:
        return replace(self, tags={**self.tags, key: word})

    def take(self, node: gs.Node) -> Match:
        if any(n is node for n in self.nodes):
            return self
        nodes = (*self.nodes, node)
        return Match(self.root or node, self.tensors, self.values, nodes, self.tags, self.seen)

    def saw(self, pattern: int, tensor: gs.Tensor) -> Match:
        return replace(self, seen={**self.seen, pattern: tensor})


@dataclass
class Trace:
    """The failed condition that the matcher came furthest to: the reason of a near-miss."""

    depth: int = 0
    reason: str = ""
    nodes: tuple[gs.Node, ...] = ()

    def fail(self, match: Match, reason: str, depth: int = 0) -> None:
        depth = max(depth, len(match.nodes))
        if depth > self.depth or (depth == self.depth and self.reason == UNTOLD):
            self.depth, self.reason, self.nodes = depth, reason, match.nodes


def roots(pattern: Pattern) -> frozenset[str]:
    """The kinds of node that a match can end in."""
    if isinstance(pattern, Op):
        return frozenset({pattern.kind})
    if isinstance(pattern, Alt):
        return frozenset().union(*(roots(p) for p in pattern.options))
    if isinstance(pattern, Tag):
        return roots(pattern.pattern)
    return frozenset()


def match(pattern: Pattern, tensor: gs.Tensor, view: View, trace: Trace) -> Iterator[Match]:
    """Every way in which `pattern` describes `tensor`, the preferred ones first."""
    _note_repeats(pattern)
    return _match(pattern, tensor, Match(), view, trace)


_REPEATED: set[int] = set()  # ids of the parts that stand more than once in a pattern
_NOTED: dict[int, Pattern] = {}  # the patterns that were looked at, held so that their ids stay theirs


def _note_repeats(pattern: Pattern) -> None:
    if id(pattern) in _NOTED:
        return
    _NOTED[id(pattern)] = pattern
    counts: dict[int, int] = {}
    waiting: list[Pattern] = [pattern]
    while waiting:
        p = waiting.pop()
        if isinstance(p, Var | Const):
            continue
        counts[id(p)] = counts.get(id(p), 0) + 1
        if counts[id(p)] == 1:
            waiting += [p.pattern] if isinstance(p, Tag) else p.args if isinstance(p, Op) else p.options
    _REPEATED.update(i for i, n in counts.items() if n > 1)


def _match(p: Pattern, t: gs.Tensor, m: Match, view: View, trace: Trace) -> Iterator[Match]:
    return _repeated(p, t, m, view, trace) if id(p) in _REPEATED else _single(p, t, m, view, trace)


def _repeated(p: Pattern, t: gs.Tensor, m: Match, view: View, trace: Trace) -> Iterator[Match]:
    """A part that stands several times is one value everywhere, whichever alternative it took first."""
    before = m.seen.get(id(p))
    if before is t:
        yield m
    elif before is not None and not same_value(before, t, view):
        if not view.is_fixed(t):  # else a constant, tried in the place of the other factor
            trace.fail(m, f"'{t.name}' is not '{before.name}'")
    else:
        for found in _single(p, t, m, view, trace):
            yield found if before is not None else found.saw(id(p), t)


def same_value(a: gs.Tensor, b: gs.Tensor, view: View, depth: int = 12) -> bool:
    """Whether two tensors are computed alike from the same tensors, Casts between floats apart."""
    a, b = _uncast(a, view), _uncast(b, view)
    if a is b or same_constant(a, b, view):
        return True
    one, other = view.producer(a), view.producer(b)
    if one is None or other is None or depth == 0 or kind(one) != kind(other):
        return False
    if view.scope(one) != view.scope(other) or one.outputs[0] is not a or other.outputs[0] is not b:
        return False
    if len(one.inputs) != len(other.inputs) or not _same_attributes(one, other):
        return False
    orders = [list(other.inputs)]
    if kind(one) in COMMUTATIVE and len(one.inputs) == 2:
        orders.append(orders[0][::-1])
    return any(
        all(same_value(p, q, view, depth - 1) for p, q in zip(one.inputs, order, strict=True))
        for order in orders
    )


def _same_attributes(one: gs.Node, other: gs.Node) -> bool:
    if one.attrs.keys() != other.attrs.keys():
        return False
    plain = (int, float, str, list)
    return all(isinstance(v, plain) and v == other.attrs[k] for k, v in one.attrs.items())


def _uncast(tensor: gs.Tensor, view: View) -> gs.Tensor:
    node = view.producer(tensor)
    while node is not None and node.op == "Cast" and view.dtype(node.inputs[0]) in INSIDE:
        tensor = node.inputs[0]
        node = view.producer(tensor)
    return tensor


def _single(p: Pattern, t: gs.Tensor, m: Match, view: View, trace: Trace) -> Iterator[Match]:
    if isinstance(p, Var):
        return _var(p, t, m, view, trace)
    if isinstance(p, Const):
        return _const(p, t, m, view, trace)
    if isinstance(p, Alt):
        return (found for option in p.options for found in _match(option, t, m, view, trace))
    if isinstance(p, Tag):
        return _match(p.pattern, t, m.tag(p.key, p.word), view, trace)
    return _op(p, t, m, view, trace)


def _var(p: Var, t: gs.Tensor, m: Match, view: View, trace: Trace) -> Iterator[Match]:
    bound = m.tensors.get(p.name)
    if bound is None:
        if t.is_empty():
            return
        if p.where is not None and (reason := p.where(t, view)) is not None:
            trace.fail(m, reason)
            return
        yield m.bind(p.name, t)
    elif bound is t or same_constant(bound, t, view):
        yield m
    elif view.is_fixed(bound) or not view.is_fixed(
        t
    ):  # else a constant, tried in the place of the other factor
        trace.fail(m, f"'{t.name}' is not '{bound.name}'")


def same_constant(a: gs.Tensor, b: gs.Tensor, view: View) -> bool:
    """Whether two tensors are constants of one type, shape and value."""
    if not (view.is_fixed(a) and view.is_fixed(b)) or view.shape(a) != view.shape(b):
        return False
    x, y = view.value(a), view.value(b)
    return (
        x is not None and y is not None and x.dtype == y.dtype and x.shape == y.shape and bool((x == y).all())
    )


def _const(p: Const, t: gs.Tensor, m: Match, view: View, trace: Trace) -> Iterator[Match]:
    value = view.scalar(t)
    if value is None:
        return
    if p.value is None:
        assert p.name is not None
        if p.name not in m.values:
            yield m.set(p.name, value)
        elif close(value, m.values[p.name], view.dtype(t)):
            yield m
    elif close(value, p.value, view.dtype(t)):
        yield m
    elif abs(value - p.value) < 0.1 * abs(p.value):  # else it is another constant, not this one badly rounded
        trace.fail(m, f"{value:.7g} is not {p.says or f'{p.value:.7g}'}")


def close(value: float, wanted: float, dtype: int | None) -> bool:
    """Whether a constant of that type is `wanted` but for rounding."""
    tolerance = TOLERANCE.get(dtype, DEFAULT_TOLERANCE) if dtype is not None else DEFAULT_TOLERANCE
    return math.isclose(value, wanted, rel_tol=tolerance, abs_tol=0.0)


def _op(p: Op, t: gs.Tensor, m: Match, view: View, trace: Trace) -> Iterator[Match]:
    if p.name is not None and p.name in m.tensors:
        if m.tensors[p.name] is t:
            yield m
        return
    node = view.producer(t)
    if node is None or kind(node) != p.kind or node.outputs[0] is not t:
        return
    if m.root is not None and view.scope(node) != view.scope(m.root):
        trace.fail(m, f"'{t.name}' is computed outside the inner graph")
        return
    inputs = list(node.inputs)
    while inputs and inputs[-1].is_empty():
        inputs.pop()
    if len(inputs) < len(p.args) or (len(inputs) > len(p.args) and not p.rest):
        return
    if p.where is not None and (reason := p.where(node, view)) is not None:
        if p.whole:
            trace.fail(m.take(node), reason, WHOLE)
        else:
            trace.fail(m, reason)
        return
    taken = m.take(node)
    if p.name is not None:
        taken = taken.bind(p.name, t)
    for name, tensor in zip(p.extra, node.outputs[1:], strict=False):
        if name is not None and not tensor.is_empty():
            taken = taken.bind(name, tensor)
    orders = [inputs]
    if p.kind in COMMUTATIVE and len(p.args) == 2 and inputs[0] is not inputs[1]:
        orders.append([inputs[1], inputs[0]])
    for order in orders:
        yield from _args(p.args, order, taken, view, trace)


def _args(
    args: tuple[Pattern, ...], tensors: list[gs.Tensor], m: Match, view: View, trace: Trace
) -> Iterator[Match]:
    if not args:
        yield m
        return
    for found in _match(args[0], tensors[0], m, view, trace):
        yield from _args(args[1:], tensors[1:], found, view, trace)


def read_outside(m: Match, view: View, outputs: tuple[str, ...]) -> str | None:
    """Why the match is void: a tensor inside it that something else reads. None if all is well.

    outputs: names of bound tensors that the fused op gives back, so that they may be read.
    """
    inside = {id(n) for n in m.nodes}
    given = {id(m.tensors[name]) for name in outputs if name in m.tensors}
    assert m.root is not None
    given.add(id(m.root.outputs[0]))
    for node in m.nodes:
        for tensor in node.outputs:
            if id(tensor) in given or tensor.is_empty():
                continue
            if view.is_exposed(tensor):
                return f"'{tensor.name}' inside it is a graph output"
            outside = next((r for r in tensor.outputs if id(r) not in inside), None)
            if outside is not None:
                reader = next((o.name for o in outside.outputs if o.name), outside.name)
                return f"'{tensor.name}' inside it is read by '{reader}' ({outside.op})"
    return None
