"""TrtfuseLinearAct: a GEMM with its epilogue, bias and activation (and residual) in registers."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trtfuse.body import Body
from trtfuse.fusion import Attribute, Fusion, Names, Site
from trtfuse.fusions._spelling import row_or_scalar, same_shape, show
from trtfuse.fusions.bias_act import activate, activated, activation_attributes, activation_words
from trtfuse.pattern import UNTOLD, Alt, Match, Op, Var
from trtfuse.view import View


def plain_gemm(node: gs.Node, _: View) -> str | None:
    """Condition of Gemm: x W + b and nothing else."""
    alpha, beta = node.attrs.get("alpha", 1.0), node.attrs.get("beta", 1.0)
    if node.attrs.get("transA", 0) or alpha != 1.0 or beta != 1.0:
        return f"'{node.outputs[0].name}' is a Gemm with transA, alpha {alpha:g} or beta {beta:g}"
    return None


def _attributes(m: Match, _: View) -> dict[str, Attribute]:
    transposed = any(n.op == "Gemm" and n.attrs.get("transB", 0) for n in m.nodes)
    return {**activation_attributes(m), "transB": int(transposed)}


PRODUCT = Op("MatMul", Var("x"), Var("weight"))
LINEAR = Alt(
    Op("Add", PRODUCT, Var("bias"), name="z"),
    Op("Gemm", Var("x"), Var("weight"), Var("bias"), where=plain_gemm, name="z"),
)


def _where(m: Match, view: View) -> str | None:
    weight = m.tensors["weight"]
    if not view.is_fixed(weight):
        return f"'{weight.name}' is not constant"
    if view.rank(weight) != 2:
        return f"'{weight.name}' of shape {show(view.shape(weight))} is not a matrix"
    if view.is_fixed(m.tensors["x"]):
        return UNTOLD
    residual = m.tensors.get("residual")
    return _bias(m, view) or (same_shape(residual, m.tensors["z"], view) if residual is not None else None)


def _bias(m: Match, view: View) -> str | None:
    """The bias is one value for each column of the weight: known without the shape of x."""
    tensor, matrix = m.tensors["bias"], view.shape(m.tensors["weight"])
    width = matrix and matrix[0 if _attributes(m, view)["transB"] else 1]
    shape = view.shape(tensor)
    if not view.is_fixed(tensor):
        return f"'{tensor.name}' is not constant"
    if shape is None or any(d != 1 for d in shape[:-1]) or (shape and shape[-1] not in (1, width)):
        return f"'{tensor.name}' of shape {show(shape)} is not a vector along the last axis"
    rank = view.rank(m.tensors["x"])
    return row_or_scalar(m, "bias", "z", view) if rank is None or len(shape) > rank else None


def _body(b: Body, attributes: dict[str, Attribute], names: Names, _: tuple[str, ...]) -> tuple[str, ...]:
    if attributes["transB"]:
        z = b.wide(b.op("Gemm", names["x"], names["weight"], names["bias"], transB=1))
    else:
        z = b.op("MatMul", names["x"], names["weight"])
        z = b.op("Add", b.wide(z), b.wide(names["bias"]))
    y = activate(b, z, attributes)
    if "residual" in names:
        y = b.op("Add", y, b.wide(names["residual"]))
    return (b.narrow(y),)


def _variant(site: Site) -> tuple[str, ...]:
    words = (("transB",) if site.attributes["transB"] else ()) + (
        ("residual",) if "residual" in site.tensors else ()
    )
    return (*activation_words(site), *words)


_ACTIVATED = activated(LINEAR, single=True)

# y = act(x W + bias) (+ residual)
LINEAR_ACT = Fusion(
    op="TrtfuseLinearAct",
    patterns=(Op("Add", _ACTIVATED, Var("residual")), _ACTIVATED),
    inputs=("x", "weight", "bias", "residual"),
    outputs=("y",),
    where=_where,
    attributes=_attributes,
    body=_body,
    variant=_variant,
    flops=14,
    minimum=5,
)
