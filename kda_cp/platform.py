"""Every question about the device, answered in one place.

Read the names through the module, `platform.IS_NVIDIA_HOPPER`: they are computed at their first use
and kept for the life of the process, so importing this module probes nothing and starts no driver.
(`from kda_cp.platform import IS_NVIDIA` would ask at import time.)

| name | type | meaning |
|---|---|---|
| `device` | str | the default `torch.device` type: "cuda" (NVIDIA and AMD), "xpu" or "cpu" |
| `device_platform` | str | "nvidia", "amd", "intel" or "cpu" |
| `IS_NVIDIA`, `IS_AMD`, `IS_INTEL` | bool | `device_platform` is that vendor's |
| `IS_NVIDIA_HOPPER` | bool | compute capability 9.x |
| `IS_NVIDIA_AMPERE_OR_LATER` | bool | compute capability 8.x to 12.x |
| `IS_NVIDIA_BLACKWELL` | bool | compute capability 10.x, 11.x or 12.x |
| `machine` | str | a name that processes share exactly if they run on one machine |

The architecture flags ask for the capability of the current device, once.
"""

from __future__ import annotations

import pathlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Final, Literal

import torch

__all__ = [
    "IS_AMD",
    "IS_INTEL",
    "IS_NVIDIA",
    "IS_NVIDIA_AMPERE_OR_LATER",
    "IS_NVIDIA_BLACKWELL",
    "IS_NVIDIA_HOPPER",
    "device",
    "device_platform",
    "exact_products",
    "machine",
]

# Declared for type checkers and computed by `__getattr__`.
device: Literal["cuda", "xpu", "cpu"]
device_platform: Literal["nvidia", "amd", "intel", "cpu"]
IS_NVIDIA: bool
IS_NVIDIA_AMPERE_OR_LATER: bool
IS_NVIDIA_HOPPER: bool
IS_NVIDIA_BLACKWELL: bool
IS_AMD: bool
IS_INTEL: bool
machine: str


def _find_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if torch.xpu.is_available():
        return "xpu"
    return "cpu"


def _find_platform() -> str:
    found = _answer("device")
    if found == "cuda":
        # ROCm builds of torch answer under the name of CUDA as well.
        return "amd" if torch.version.hip is not None else "nvidia"
    return "intel" if found == "xpu" else "cpu"


def _is_nvidia_generation(*majors: int) -> bool:
    return bool(_answer("IS_NVIDIA")) and torch.cuda.get_device_capability()[0] in majors


def _find_machine() -> str:
    try:  # containers of one machine have names of their own, and one kernel
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


_QUESTIONS: Final[dict[str, Callable[[], str | bool]]] = {
    "device": _find_device,
    "device_platform": _find_platform,
    "IS_NVIDIA": lambda: _answer("device_platform") == "nvidia",
    "IS_NVIDIA_AMPERE_OR_LATER": lambda: _is_nvidia_generation(8, 9, 10, 11, 12),
    "IS_NVIDIA_HOPPER": lambda: _is_nvidia_generation(9),
    "IS_NVIDIA_BLACKWELL": lambda: _is_nvidia_generation(10, 11, 12),
    "IS_AMD": lambda: _answer("device_platform") == "amd",
    "IS_INTEL": lambda: _answer("device_platform") == "intel",
    "machine": _find_machine,
}
_answers: dict[str, str | bool] = {}


def _answer(name: str) -> str | bool:
    if name not in _answers:
        _answers[name] = _QUESTIONS[name]()
    return _answers[name]


def __getattr__(name: str) -> str | bool:
    if name in _QUESTIONS:
        return _answer(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_QUESTIONS})


# fp32 products -----------------------------------------------------------------------------------

# What torch may do with an fp32 product: "none" (nothing was asked for) and "ieee" are fp32
# throughout; every other value ("tf32", "bf16") rounds the operands.
_EXACT: Final = ("none", "ieee")

# (backend, operation) of each setting that reaches a matrix product, in torch's own words.
# cuBLAS and rocBLAS read the first; oneDNN, on a CPU or an Intel GPU, the second.
_Setting = tuple[str, str]
_SETTINGS: Final[tuple[_Setting, ...]] = (("cuda", "matmul"), ("mkldnn", "matmul"))

# The settings belong to the process while autograd runs backwards on threads of its own, so entries
# are counted: the first one in saves, the last one out restores.
_lock = threading.Lock()
_entries = 0
_replaced: dict[_Setting, str] = {}


def _get_precision(setting: _Setting) -> str:
    return str(getattr(getattr(torch.backends, setting[0]), setting[1]).fp32_precision)


def _set_precision(setting: _Setting, value: str) -> None:
    getattr(getattr(torch.backends, setting[0]), setting[1]).fp32_precision = value


def _enter() -> None:
    global _entries
    with _lock:
        _entries += 1
        for setting in _SETTINGS:
            found = _get_precision(setting)
            if found not in _EXACT:
                _replaced.setdefault(setting, found)
                _set_precision(setting, "ieee")


def _leave() -> None:
    global _entries
    with _lock:
        _entries -= 1
        if _entries:
            return
        while _replaced:
            setting, value = _replaced.popitem()
            # A value that came from `torch.backends.fp32_precision` is inherited again, so that a
            # later change there is still followed; only a value of its own is written back.
            _set_precision(setting, "none")
            if _get_precision(setting) != value:
                _set_precision(setting, value)


@contextmanager
def exact_products(device_type: str) -> Iterator[None]:
    """Compute matrix products of fp32 tensors in IEEE fp32 inside the block.

    Inside, autocast is off for `device_type` in this thread, and neither
    `torch.set_float32_matmul_precision`, `torch.backends.cuda.matmul.allow_tf32` nor any
    `fp32_precision` of torch.backends has an effect on matrix products. On leaving, also by an
    exception, each of them reads as before. Do not read the legacy getters (`allow_tf32`,
    `torch.get_float32_matmul_precision`) *inside* the block: torch raises where they disagree with
    the settings used here.

    The settings are the process's: other threads compute exact products as well while any thread is
    inside. Entering costs two reads of a setting where there is nothing to change, and starts no
    driver.

    Args:
        device_type: the device type of the products' tensors, as `tensor.device.type`.
    """
    autocast = (
        torch.autocast(device_type, enabled=False)
        if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
        else nullcontext()
    )
    _enter()
    try:
        with autocast:
            yield
    finally:
        _leave()
