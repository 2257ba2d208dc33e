"""TensorRT's many lines, made into one that says what is wrong and how to fix it."""

from __future__ import annotations

import re

NAMES = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}
QUANTIZATION = frozenset({"QuantizeLinear", "DequantizeLinear"})
# Quantization that trtfuse cannot take out.
_INTEGERS = frozenset("DynamicQuantizeLinear MatMulInteger ConvInteger QLinearConv QLinearMatMul".split())
_WEIGHT = re.compile(r"Failed to import initializer.*Failed to import initializer: (\S+)")
_LIMIT = 400
# "ITensor::getDimensions: Error Code 4: API Usage Error (name: reason. In checkType at /_src/.../x.cpp:456)"
_CODE = re.compile(r"Error Code \d+: [^(]*\((?P<text>.*)\)\s*$", re.DOTALL)
_PLACE = re.compile(
    r"\s*\bIn \w+ at \S+?:\d+\s*\)?|\[?\w+\.(cpp|h)(::\w+)?:+\d+(: \w+\])?\]?:?\s*|MyelinCheckException: "
)
_CHECK = re.compile(r"CHECK\(.*?\) failed\. (?=\w)")  # the code's words, where words for people follow
_NOISE = re.compile(
    r"cudaError 35|catchCudaError|CUDA driver version is insufficient|^(Invalid|Unsupported) Node - \S*$"
)


def clean(text: str) -> str:
    """One line of a message: no source places, no repeated spaces, a few lines of a terminal at most."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if not _NOISE.search(line)] or lines
    line = telling[0] if telling else ""
    if found := _CODE.search(line):
        line = found["text"]
    line = re.sub(r"\s+", " ", _CHECK.sub("", _PLACE.sub(" ", line))).strip().rstrip(".) ")
    opened = line.count("(") - line.count(")")
    line += ")" * max(opened, 0)
    return line if len(line) <= _LIMIT else line[: _LIMIT - 3] + "..."


def parse_error(target: str, node: str, op: str, index: int, text: str) -> str:
    """The line for a node that the parser refuses. index: of the node. text: the parser's description."""
    reason = clean(text)
    for prefix in (f"{node}: ", f"{node}:", "Assertion failed: "):
        reason = reason.removeprefix(prefix)
    if found := _WEIGHT.search(reason):
        return (
            f"{NAMES[target]} refuses the weight {found[1]!r}: it does not take its type; "
            "build with --qdq auto or --qdq drop if it is quantized, else export it as float or int64"
        )
    unknown = "Plugin not found" in reason
    if unknown or reason in ("false", ""):
        reason = "it knows no such operator" if unknown else "it does not support this operator"
    named = f"the node {node!r}" if node else f"node {index}" if index >= 0 else "a node"
    where = f"{named} ({op})" if op else named if node else "the model"
    return f"{NAMES[target]} refuses {where}: {reason}; {_parse_hint(op, unknown)}"


def _parse_hint(op: str, unknown: bool) -> str:
    if op in _INTEGERS:
        return "quantize the model in the QDQ format, or export it in float"
    if op in QUANTIZATION:
        return "build with --qdq auto or --qdq drop, which take out the quantization it cannot keep"
    if unknown:
        return "export the model with standard ONNX operators in its place, or use --target onnx"
    return "export the model without it, or use --target onnx"


def build_error(target: str, errors: list[str]) -> str:
    """The line for a network that was parsed but not built. errors: of the logger, in order."""
    texts = [clean(e) for e in errors]
    reason = texts[0] if texts else "it gives no reason (see its messages with -vv)"
    return f"{NAMES[target]} cannot build the engine: {reason}; {_build_hint(' '.join(errors))}"


def _build_hint(text: str) -> str:
    if "Turing" in text or "SM75" in text:
        return "leave compute capability 7.5 out, or export the model in fp16 for it"
    if "ttention" in text and "dedicated kernel" in text:
        return "spell the attention as MatMul, Softmax and MatMul (--select none), or export it in fp16"
    if re.search(r"CUDA driver|no CUDA-capable|cudaError(?!\w)", text):
        return "build on a machine with an NVIDIA GPU and a current driver, or leave --compute-capability out"
    if re.search(r"[Pp]rofile|[Dd]imension|k(MIN|OPT|MAX)\b|minShape|maxShape", text):
        return "give shapes that fit with --min-shapes, --opt-shapes and --max-shapes"
    if re.search(r"memory", text):
        return "use smaller --max-shapes, or a machine with more memory"
    return "simplify the graph there, keep sites by --select none, or use --target onnx"
