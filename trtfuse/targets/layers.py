"""What an engine is made of: its layers as TensorRT's inspector tells them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trtfuse.errors import BuildError


@dataclass(frozen=True)
class Layer:
    """One layer of an engine. kind: TensorRT's word ("PluginV3", "gemm", "kgen"). nodes: names of the ONNX
    nodes that it computes, as far as TensorRT tells."""

    name: str
    kind: str
    nodes: tuple[str, ...]


def inspect(trt: Any, logger: Any, data: Any) -> list[Layer]:
    """The layers of a serialized engine. Raises BuildError where it cannot be deserialized."""
    runtime = trt.Runtime(logger)
    runtime.engine_host_code_allowed = True  # it was built right here
    engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        raise BuildError(
            "TensorRT cannot load the engine that it has just built: free GPU memory, or see its messages "
            "with -vv"
        )
    inspector = engine.create_engine_inspector()
    return parse(inspector.get_engine_information(trt.LayerInformationFormat.JSON))


def parse(text: str) -> list[Layer]:
    """The layers in the inspector's JSON; names alone where the engine holds no more."""
    found = []
    for layer in json.loads(text).get("Layers", []):
        if isinstance(layer, str):
            found.append(Layer(layer, "", ()))
            continue
        found.append(Layer(layer.get("Name", ""), layer.get("LayerType", ""), _nodes(layer)))
    return found


def _nodes(layer: dict[str, Any]) -> tuple[str, ...]:
    """The nodes in a layer's metadata: "[ONNX Layer: a]\\x1e[ONNX Layer: b]"."""
    parts = str(layer.get("Metadata", "")).split("[ONNX Layer: ")[1:]
    return tuple(part.rpartition("]")[0] for part in parts)


def require_plugins(layers: Sequence[Layer], sites: Sequence[str]) -> None:
    """Raises BuildError for a site that is no plugin in the engine: TensorRT took another path."""
    plugins = [layer for layer in layers if layer.kind.startswith("Plugin")]
    named = {layer.name for layer in plugins} | {node for layer in plugins for node in layer.nodes}
    lost = [site for site in sites if site not in named]
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise BuildError(
            f"TensorRT built the engine without the plugin of {', '.join(lost[:3])}{more}: "
            "choose native for it by --select FILE"
        )
