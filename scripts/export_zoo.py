"""Exports the architectures that people run, with random weights, as the exporters spell them.

    pip install torch transformers timm onnxscript          (not needed by trtfuse itself)
    python scripts/export_zoo.py FOLDER                     every model, exporter, opset, attention and type
    python scripts/export_zoo.py FOLDER --models bert,gpt2 --exporters dynamo --opsets 20
    python scripts/count_exports.py FOLDER                  what trtfuse finds in them

Models (zoo.py) are small: two layers, 64 wide, four heads where the architecture lets it be so. Every 1-D
parameter is moved away from the 1 or 0 it starts with: exporters drop a scale of 1 and a bias of 0, and a
fusion that loses a bias would go unseen. Batch and sequence are dynamic. An export that the installed
versions cannot make is named and left out; older versions spell differently, so `--label` tells them apart.
"""
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from zoo import ZOO

TORCHSCRIPT, DYNAMO = "torchscript", "dynamo"
OPSETS = {TORCHSCRIPT: (12, 14, 17), DYNAMO: (18, 20, 23)}


@dataclass(frozen=True)
class Job:
    """One file to make."""

    model: str
    exporter: str
    opset: int
    attention: str  # "eager", "sdpa" or "" where the two do not differ
    dtype: str  # "fp32" or "fp16"
    label: str = ""  # of the versions that export

    @property
    def file(self) -> str:
        exporter = f"{self.exporter}-{self.label}" if self.label else self.exporter
        words = (self.model, exporter, str(self.opset), self.attention, self.dtype, "onnx")
        return ".".join(w for w in words if w)


def jobs(
    models: Iterable[str],
    exporters: Iterable[str],
    opsets: set[int],
    dtypes: Iterable[str],
    label: str = "",
) -> Iterator[Job]:
    """Every file of those models, exporters, opsets (all if none) and types."""
    for model in models:
        for exporter in exporters:
            for opset in OPSETS[exporter]:
                for attention in ("eager", "sdpa") if ZOO[model].attention else ("",):
                    for dtype in dtypes:
                        if (not opsets or opset in opsets) and not (attention == "sdpa" and opset < 14):
                            yield Job(model, exporter, opset, attention, dtype, label)


def export(job: Job, folder: Path) -> None:
    """Writes the file of a job. Raises whatever the exporter raises."""
    import torch

    example = ZOO[job.model].make(job.attention or "eager")
    inputs = list(example.inputs.values())
    module = example.module.eval()
    if job.dtype == "fp16":
        module = module.half()
        inputs = [t.half() if t.is_floating_point() else t for t in inputs]
    path = str(folder / job.file)
    names = {"input_names": list(example.inputs), "output_names": ["y"], "opset_version": job.opset}
    with torch.no_grad():
        if job.exporter == TORCHSCRIPT:
            torch.onnx.export(
                module, tuple(inputs), path, dynamo=False, dynamic_axes=dict(example.axes), **names
            )
        else:
            auto = torch.export.Dim.DYNAMIC
            shapes = tuple(dict.fromkeys(example.axes[n], auto) for n in example.inputs)
            # a module of variadic inputs has its shapes one level deeper
            variadic = type(module).__name__ == "First"
            torch.onnx.export(
                module,
                tuple(inputs),
                path,
                dynamo=True,
                external_data=False,
                dynamic_shapes=(shapes,) if variadic else shapes,
                **names,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default=",".join(ZOO), help="of the zoo, comma-separated")
    parser.add_argument("--exporters", default=f"{TORCHSCRIPT},{DYNAMO}")
    parser.add_argument("--opsets", default="", help="comma-separated; every one of the exporter's if none")
    parser.add_argument("--dtypes", default="fp32,fp16")
    parser.add_argument("--label", default="", help='of the versions, in the names of the files: "torch25"')
    parser.add_argument("--skip-existing", action="store_true", help="keep the files that are there")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    opsets = {int(o) for o in options.opsets.split(",") if o}
    chosen = (options.models.split(","), options.exporters.split(","), opsets, options.dtypes.split(","))
    for job in jobs(*chosen, options.label):
        path = options.folder / job.file
        if options.skip_existing and path.exists():
            continue
        try:
            # the exporters talk on both streams
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                export(job, options.folder)
        except Exception as e:  # an exporter may raise anything; the next file is none the worse for it
            path.unlink(missing_ok=True)
            print(f"left out {job.file}: {type(e).__name__}: {' '.join(str(e).split())[:150]}")
            continue
        print(job.file, flush=True)


if __name__ == "__main__":
    main()
