"""The clocks of the GPU while something is timed: a clock that moves moves every time with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Any, Protocol

from trtfuse.errors import TrtfuseError

STEADY = 0.05  # how far the SM clock may move, as a part of its highest, without a note

# NVML's reasons that slow a GPU down against its settings. Idling and clocks that somebody set are none.
_REASONS = {
    "SwPowerCap": "power",
    "SwThermalSlowdown": "temperature",
    "HwThermalSlowdown": "temperature",
    "HwPowerBrakeSlowdown": "the power brake",
    "HwSlowdown": "hardware slowdown",
    "SyncBoost": "sync boost",
}


@dataclass(frozen=True)
class Sample:
    """One look at a GPU; None for what it does not tell. Clocks in MHz, temperature in degrees Celsius,
    power in W. throttled: what slowed it down, in words; empty where nothing did."""

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    temperature: int | None = None
    power: float | None = None
    throttled: tuple[str, ...] = ()


class Clocked(Protocol):
    """What gives samples; `ClockSource` does."""

    def sample(self) -> Sample: ...


class ClockSource:
    """A GPU's clocks by NVML. Made by `open`; `close` when done, or use it in a with statement."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    @classmethod
    def open(cls, device: int | str = 0) -> ClockSource | None:
        """The clocks of a GPU: its PCI bus id, or its index as CUDA counts.

        None where nvidia-ml-py, the driver or the GPU is missing. CUDA's index goes by way of the bus id,
        since CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER give CUDA another order than NVML's.
        """
        try:
            import pynvml
        except ImportError:
            return None
        bus = device if isinstance(device, str) else _bus(device)
        if bus is None:
            return None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return None
        try:
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(bus))
        except pynvml.NVMLError:
            pynvml.nvmlShutdown()
            return None

    def sample(self) -> Sample:
        """What the GPU says of itself now. Raises nothing."""
        nvml, handle = self._nvml, self._handle
        milliwatts = self._read(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        reasons = self._read(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        return Sample(
            sm_mhz=self._read(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            memory_mhz=self._read(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            temperature=self._read(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            power=milliwatts / 1e3 if milliwatts is not None else None,
            throttled=self._words(reasons or 0),
        )

    def close(self) -> None:
        """Ends the use of NVML."""
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def __enter__(self) -> ClockSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, ask: Callable[[], int]) -> int | None:
        """An answer, None where this GPU or driver does not give it."""
        try:
            return int(ask())
        except self._nvml.NVMLError:
            return None

    def _words(self, reasons: int) -> tuple[str, ...]:
        bits = (
            (getattr(self._nvml, f"nvmlClocksEventReason{name}"), word) for name, word in _REASONS.items()
        )
        return tuple(dict.fromkeys(word for bit, word in bits if reasons & bit))


def _bus(device: int) -> str | None:
    """The PCI bus id of CUDA's GPU of an index, None where CUDA has none."""
    from trtfuse import cuda

    try:
        return cuda.device_properties(device).bus
    except TrtfuseError:
        return None


@dataclass(frozen=True)
class Clocks:
    """A GPU's clocks during a measurement. SM clocks in MHz. throttled: all that slowed it down, in words.
    temperature: the highest, in degrees Celsius. power: the highest, in W."""

    sm_min: int
    sm_median: float
    sm_max: int
    throttled: tuple[str, ...] = ()
    temperature: int | None = None
    power: float | None = None

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Clocks | None:
        """The samples together, None where none tells the SM clock."""
        clocks = [s.sm_mhz for s in samples if s.sm_mhz is not None]
        if not clocks:
            return None
        return cls(
            sm_min=min(clocks),
            sm_median=median(clocks),
            sm_max=max(clocks),
            throttled=tuple(dict.fromkeys(word for s in samples for word in s.throttled)),
            temperature=max((s.temperature for s in samples if s.temperature is not None), default=None),
            power=max((s.power for s in samples if s.power is not None), default=None),
        )

    @property
    def moved(self) -> float:
        """How far the SM clock moved, as a part of its highest."""
        return (self.sm_max - self.sm_min) / self.sm_max if self.sm_max else 0.0

    def sentence(self) -> str:
        """ "SM clock 1830 to 1980 MHz; throttled by power"."""
        span = f"{self.sm_min} to {self.sm_max}" if self.sm_min != self.sm_max else f"{self.sm_max}"
        by = f"; throttled by {' and '.join(self.throttled)}" if self.throttled else ""
        return f"SM clock {span} MHz{by}"

    def notes(self) -> tuple[str, ...]:
        """A warning where the clock moved by more than `STEADY`, else none."""
        if self.moved <= STEADY:
            return ()
        return (
            f"the SM clock moved by {100 * self.moved:.0f} % while this was measured ({self.sentence()}): "
            "for steadier times lock it with `nvidia-smi --lock-gpu-clocks`",
        )
