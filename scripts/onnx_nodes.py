"""Which of ONNX's own node tests trtfuse recognises, as one operator and spelled out as its function.

    python scripts/onnx_nodes.py

ONNX has about 1900 test models of a node. Of an operator that is a function there is a second model for each,
`..._expanded`, in which it is spelled out: variance as E[x^2] - E[x]^2, Sum for Add, CastLike, axes from
Range, sizes computed at run time. Those of the families below are fused as a model would have them: weights
constant, and nothing read but the first output. Writes results/onnx_nodes.md.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper

from trtfuse import files
from trtfuse import model as models
from trtfuse.pipeline import fuse_model

RESULTS = Path(__file__).resolve().parent / "results" / "onnx_nodes.md"
HEADER = """# ONNX's own node tests

Made by `scripts/onnx_nodes.py` with onnx {version}. Recognised of all: the operator itself, and spelled out
as its function; weights are constant and nothing reads more than the first output. Where the cases as they
stand (weights are inputs, statistics outputs) come to another number, it follows.

"""
Feeds = dict[str, Any]  # an array, or a list of them for a sequence


@dataclass(frozen=True)
class Family:
    """One operator's cases. op: the fused op that recognises it, None where it must stay as it is.

    data: how many inputs are data; the others are weights. None: all are data.
    operator, spelled: why the cases that are not recognised are not: a reason, and a pattern of their names.
    """

    op: str | None
    data: int | None = None
    operator: tuple[tuple[str, str], ...] = ()
    spelled: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Case:
    """One test model. op: the operator that it tests; spelled: out as its function. runs: feeds, outputs."""

    name: str
    op: str
    spelled: bool
    model: ModelProto
    runs: tuple[tuple[Feeds, Sequence[Any]], ...]


@dataclass(frozen=True)
class Fused:
    """What became of a case. model: None where it crashed, which `failure` tells. ops: of its sites."""

    case: Case
    model: ModelProto | None
    ops: tuple[str, ...] = ()
    failure: str = ""


ANY = ""
# 2d_axis1 and 3d_axis2 are the last axis
WIDE = ("over more axes than the last", r"axis0|4d_axis[12]|3d_axis1|negative_[234]")
FAMILIES: dict[str, Family] = {
    "LayerNormalization": Family("TrtfuseLayerNorm", 1, (WIDE,)),
    "RMSNormalization": Family("TrtfuseRmsNorm", 1, (WIDE,), (WIDE,)),
    "GroupNormalization": Family(
        "TrtfuseGroupNorm",
        1,
        spelled=(("reshaped to groups by way of five axes (its rows' norm is found)", ANY),),
    ),
    "Gelu": Family("TrtfuseBiasAct"),
    "Swish": Family("TrtfuseBiasAct"),
    "HardSwish": Family("TrtfuseBiasAct"),
    "Mish": Family("TrtfuseBiasAct"),
    "SwiGLU": Family(
        "TrtfuseGatedAct",
        operator=(("an operator of opset 28", ANY),),
        spelled=(("Swish with a slope of its own", "alpha"),),
    ),
    "Softmax": Family(
        "TrtfuseSoftmax",
        operator=(("a softmax alone stays", ANY),),
        spelled=(("over another axis than the last", "axis_[01]"),),
    ),
    "LogSoftmax": Family(None),
    "Attention": Family(
        "TrtfuseAttention",
        operator=(
            ("three axes, the heads packed", "attention_3d"),
            ("a cache, or lengths of the keys", "past|padded_kv|nonpad|ext_cache"),
            ("its scores have a name, though nothing reads them", "qk_matmul|gqa_rank4_mask"),
            ("causal", "causal|local_window(?!_default)"),
            ("a window of the keys", "bidirectional_window"),
            ("a soft cap", "softcap"),
            ("grouped heads", "gqa"),
        ),
        spelled=(
            ("a soft cap", "softcap"),
            ("a softmax in fp64", "gqa_rank4_mask"),
        ),
    ),
    "FlexAttention": Family(
        "TrtfuseAttention",
        operator=(("an operator in preview, with graphs inside", ANY),),
        spelled=(
            ("fp64", "double"),
            ("the result is cast from fp32 to fp16", "fp16"),
            ("the shape of the scores is read", "causal|relative"),
            ("a soft cap", "soft_cap"),
            ("the softmax is changed before its product with v", "prob_mod"),
        ),
    ),
}


@cache
def cases() -> tuple[Case, ...]:
    """Every node test that has a model."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [(c.name, c.model, c.data_sets) for c in collect_testcases() if c.model is not None]
    tested = {name: model.graph.node[-1].op_type for name, model, _ in found}
    return tuple(
        Case(name, tested[name.split("_expanded")[0]], "_expanded" in name, model, _runs(model, data))
        for name, model, data in found
    )


def _runs(model: ModelProto, data: Any) -> tuple[tuple[Feeds, Sequence[Any]], ...]:
    names = [i.name for i in model.graph.input]
    return tuple((dict(zip(names, feed, strict=True)), outputs) for feed, outputs in data)


def in_a_model(case: Case, data: int | None) -> Case:
    """The case as a model has it: inputs after the first `data` are constant, the first output is read."""
    model, (feeds, outputs) = copy(case.model), case.runs[0]
    names = [i.name for i in model.graph.input]
    for name in names[data:] if data is not None else ():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(feeds[name]), name))
    kept = [i for i in model.graph.input if i.name in names[:data]]
    del model.graph.input[:], model.graph.output[1:]
    model.graph.input.extend(kept)
    return replace(case, model=model, runs=(({i.name: feeds[i.name] for i in kept}, outputs[:1]),))


def copy(model: ModelProto) -> ModelProto:
    """An independent copy."""
    result = ModelProto()
    result.CopyFrom(model)
    return result


def fuse(case: Case) -> Fused:
    """The case with all its sites fused."""
    try:
        held, matched = fuse_model(models.hold(copy(case.model), Path(f"{case.name}.onnx")))
        return Fused(case, models.whole(held), tuple(s.fusion.op for s in matched.chosen))
    except Exception as failure:  # whatever it raises is a fault of its own
        return Fused(case, None, failure=f"{type(failure).__name__}: {models.one_line(failure)}")


@cache
def plain(op: str | None) -> tuple[Fused, ...]:
    """The cases of one operator as they stand, fused; None: those of no family."""
    return tuple(fuse(c) for c in cases() if (c.op == op if op else c.op not in FAMILIES))


@cache
def modelled(op: str) -> tuple[Fused, ...]:
    """The cases of a family as models have them, fused."""
    return tuple(fuse(in_a_model(c, FAMILIES[op].data)) for c in cases() if c.op == op)


def recognised(result: Fused) -> bool:
    """Whether the case is what its family's fused op replaces."""
    return FAMILIES[result.case.op].op in result.ops


def reason(result: Fused) -> str | None:
    """Why a case is not recognised, as FAMILIES has it; None where it has no reason."""
    family = FAMILIES[result.case.op]
    reasons = family.spelled if result.case.spelled else family.operator
    return next((why for why, names in reasons if re.search(names, result.case.name)), None)


def count(results: Sequence[Fused], spelled: bool) -> tuple[int, int]:
    """How many are recognised, of how many."""
    mine = [r for r in results if r.case.spelled == spelled]
    return sum(recognised(r) for r in mine), len(mine)


def table() -> Iterator[str]:
    """The lines of the report."""
    yield from ("| operator | fused op | operator itself | spelled out |", "|---|---|---|---|")
    for op, family in FAMILIES.items():
        cells = [op, family.op or "none: it must stay"]
        for spelled in (False, True):
            found, every = count(modelled(op), spelled)
            bare, _ = count(plain(op), spelled)
            text = f"{found}/{every}" + (f" ({bare} as they stand)" if bare != found else "")
            cells.append(text if every else "no cases")
        yield "| " + " | ".join(cells) + " |"
    yield from ("", "What is not recognised, and why:", "")
    for op, family in FAMILIES.items():
        left = Counter((r.case.spelled, reason(r)) for r in modelled(op) if not recognised(r))
        for (spelled, why), n in sorted(left.items(), key=str) if family.op else ():
            yield f"- {op}, {'spelled out' if spelled else 'operator itself'}: {n}: {why}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 if a case crashes."""
    argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0]).parse_args(argv)
    text = "\n".join(table()) + "\n"
    print(text)
    with files.atomic_write(RESULTS) as f:
        f.write((HEADER.format(version=onnx.__version__) + text).encode())
    crashed = [r for op in (*FAMILIES, None) for r in plain(op) if r.model is None]
    for result in crashed:
        print(f"{result.case.name}: {result.failure}", file=sys.stderr)
    return 1 if crashed else 0


if __name__ == "__main__":
    sys.exit(main())
