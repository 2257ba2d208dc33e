"""TensorRT's messages, made into one line that says how to go on. The texts are those of TensorRT-RTX 1.7."""

from __future__ import annotations

import pytest

from trtfuse.targets import messages

INT32 = (
    "Invalid Node - bias_DQ\n"
    "ITensor::getDimensions: Error Code 4: API Usage Error (bias_DQ: input has type Int32 but must have "
    "type FP8, FP4, Int4, Int8, or UInt8. In checkType at /_src/optimizer/common/nodeBase.cpp:456)\n"
    "[checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime (In catchCudaError at "
    "/_src/common/dispatch/checkMacros.cpp:250 (cudaError 35: CUDA driver version is insufficient))"
)
ZERO_POINT = "Assertion failed: shiftIsAllZeros(zeroPoint): Non-zero zero point is not supported."
PLUGIN = (
    'Assertion failed: creator && "Plugin not found, are the plugin name, version, and namespace correct?"'
)
WEIGHT = (
    "Failed to import initializer: In node -1 with name: and operator: (importInitializers): "
    "UNSUPPORTED_NODE: Assertion failed: ctx->getWeightsContext().convertOnnxWeights(initializer, &weights): "
    "Failed to import initializer: wq"
)
TURING = (
    "IBuilder::buildSerializedNetwork: Error Code 1: Myelin ([pass.cpp:337: check_turing_op_compatibility] "
    "Cannot compile operation '/value/MatMul' for Turing (SM75): FP32 GEMM is not supported. "
    "In compileGraph at /_src/optimizer/myelin/codeGenerator.cpp:1398)"
)
SCOPE = (
    "[graphScope.cpp::analyze::471] Error Code 2: Internal Error (Assertion tScope.getType() != "
    "ScopeType::kUNDEFINED failed.  In analyze at /_src/optimizer/common/graphScope.cpp:471)"
)


def test_a_refused_node_is_named_with_its_cause_and_the_option():
    line = messages.parse_error("tensorrt-rtx", "bias_DQ", "DequantizeLinear", 3, INT32)
    assert line == (
        "TensorRT-RTX refuses the node 'bias_DQ' (DequantizeLinear): input has type Int32 but must have "
        "type FP8, FP4, Int4, Int8, or UInt8; build with --qdq auto or --qdq drop, which take out the "
        "quantization it cannot keep"
    )


@pytest.mark.parametrize(
    ("node", "op", "text", "parts"),
    [
        ("", "QuantizeLinear", ZERO_POINT, ["node 7 (QuantizeLinear)", "Non-zero zero point", "--qdq drop"]),
        ("f", "Foo", PLUGIN, ["'f' (Foo): it knows no such operator", "standard ONNX operators"]),
        (
            "d",
            "Det",
            "Assertion failed: false",
            ["'d' (Det): it does not support this operator", "--target onnx"],
        ),
        ("", "MatMulInteger", "false", ["it does not support", "QDQ format"]),
        ("", "", WEIGHT, ["the weight 'wq'", "its type", "--qdq drop"]),
    ],
)
def test_what_the_parser_says(node, op, text, parts):
    line = messages.parse_error("tensorrt", node, op, 7, text)
    assert "\n" not in line
    assert "Assertion" not in line
    for part in ["TensorRT refuses", *parts]:
        assert part in line


@pytest.mark.parametrize(
    ("errors", "parts"),
    [
        ([TURING], ["Cannot compile operation '/value/MatMul' for Turing", "7.5 out"]),
        ([SCOPE], ["Assertion tScope.getType()", "--select none"]),
        (
            ["Error Code 4: API Usage Error (kMIN dimensions in profile 0 are wrong)"],
            ["kMIN", "--min-shapes"],
        ),
        ([], ["no reason", "-vv"]),
        (["first", "second"], ["first"]),
    ],
)
def test_what_the_builder_says(errors, parts):
    line = messages.build_error("tensorrt-rtx", errors)
    assert "\n" not in line
    assert "/_src" not in line
    assert "second" not in line
    for part in ["TensorRT-RTX cannot build", *parts]:
        assert part in line


def test_long_messages_are_cut():
    assert len(messages.clean("word " * 1000)) <= 400
