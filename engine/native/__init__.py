"""Compiles and loads the kernels of this folder, and calls them with tensors.

The library is built once per source and CPU with the system's C++ compiler (a few seconds) and kept in the user's
cache folder. Without a compiler, `load()` is None and torch does the work, as it does on GPUs.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from engine.ops import HeadNorms, TorchOps

_SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cpp")))
_HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
COMPILERS = ("c++", "g++", "clang++")
# No -ffast-math: infinities and NaN keep their meaning.
_FLAGS = (
    "-O3 -march=native -std=c++17 -fPIC -fopenmp -Wno-aggressive-loop-optimizations "
    "-fno-math-errno -fno-trapping-math -fno-signed-zeros -fassociative-math"
).split()


class Attention(Structure):
    """As in kernels.h."""

    _fields_ = (
        [(name, c_void_p) for name in ("keys", "values")]
        + [(name, c_int64) for name in ("q_heads", "kv_heads", "dim", "value_dim", "page_size", "window")]
        + [("scale", c_float), ("softcap", c_float), ("sinks", c_void_p)]
    )


class Step(Structure):
    """As in kernels.h."""

    _fields_ = (
        [(name, c_int64) for name in ("tokens", "parts")]
        + [(name, c_void_p) for name in ("slots", "q_start", "kv_len", "page_table")]
        + [("table_stride", c_int64)]
    )


class Linear(Structure):
    """As in kernels.h."""

    _fields_ = (
        [(name, c_void_p) for name in ("weights", "scales", "bias")]
        + [(name, c_int64) for name in ("inputs", "outputs", "format")]
    )  # fmt: skip


class DecoderLayer(Structure):
    """As in decoder.cpp."""

    _fields_ = (
        [(name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")]
        + [(name, Linear) for name in ("qkv", "out", "gate_up", "down")]
        + [("attention", Attention), ("eps", c_float), ("head_eps", c_float)]
    )


FORMATS = ("float32", "bfloat16", "int8", "int4", "pairs")  # of Linear's weights, by number


class Kernels:
    """The library's functions for one dtype."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        suffix = str(dtype).removeprefix("torch.")

        def function(name: str, *types: type) -> Callable[..., None]:
            found = getattr(library, f"{name}_{suffix}")
            found.argtypes, found.restype = types, None
            return found

        p, n, f = c_void_p, c_int64, c_float
        self.rms_norm = function("rms_norm", p, p, f, n, n, p)
        self.silu_mul = function("silu_mul", p, n, n, p)
        self.rotate = function("rotate", p, n, n, n, n, n, p, p, p, p, f)
        self.gemm = function("gemm", POINTER(Linear), p, n, p, p)
        self.attend = function("attend", POINTER(Attention), POINTER(Step), p, n, p, n, p, n, p)
        self.decode = function("decode", POINTER(DecoderLayer), n, POINTER(Step), p, p, p)
        library.set_threads(torch.get_num_threads())
        library.gemm_columns.restype = c_int64
        self.columns: int = library.gemm_columns()  # of a panel of weights


class NativeOps(TorchOps):
    """The operations of TorchOps in one call each, for contiguous rows on the CPU."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        self.kernels.rms_norm(x.data_ptr(), weight.data_ptr(), eps, x.shape[0], x.shape[1], out.data_ptr())
        return out

    def rotate(
        self, qkv: Tensor, num_heads: int, num_kv_heads: int, cos: Tensor, sin: Tensor, norms: HeadNorms | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, width = qkv.shape
        dim = width // (num_heads + 2 * num_kv_heads)
        q_norm, k_norm, eps = (norms.query.data_ptr(), norms.key.data_ptr(), norms.eps) if norms else (None, None, 0.0)
        self.kernels.rotate(
            qkv.data_ptr(), tokens, width, num_heads, num_kv_heads, dim, cos.data_ptr(), sin.data_ptr(),
            q_norm, k_norm, eps,
        )  # fmt: skip
        heads = qkv.view(tokens, -1, dim)
        return (
            heads[:, :num_heads],
            heads[:, num_heads : num_heads + num_kv_heads],
            heads[:, num_heads + num_kv_heads :],
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        tokens, width = gate_up.shape
        out = gate_up.new_empty(tokens, width // 2)
        self.kernels.silu_mul(gate_up.data_ptr(), tokens, width // 2, out.data_ptr())
        return out


def kernels(dtype: torch.dtype) -> Kernels | None:
    """None if there is no compiler here, or the kernels do not know the dtype."""
    library = _library()
    if library is None or dtype not in (torch.float32, torch.bfloat16):
        return None
    return Kernels(library, dtype)


@functools.cache
def _library() -> ctypes.CDLL | None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return None
    try:
        return ctypes.CDLL(str(_built(compiler)))
    except (OSError, subprocess.SubprocessError):
        return None


def _built(compiler: str) -> Path:
    """The library's file, compiled unless it is there. Raises OSError or SubprocessError."""
    sources = [path.read_text() for path in (*_SOURCES, *_HEADERS)]
    what = "\n".join([*sources, *_FLAGS, compiler, platform.machine(), _cpu_features()])
    name = f"native-{hashlib.sha256(what.encode()).hexdigest()[:16]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "worker-paged"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / name
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            objects = [Path(scratch) / f"{source.stem}.o" for source in _SOURCES]
            running = [
                subprocess.Popen([compiler, *_FLAGS, "-c", "-o", to, source], stderr=subprocess.DEVNULL)
                for source, to in zip(_SOURCES, objects, strict=True)
            ]
            if any([process.wait() for process in running]):
                raise subprocess.SubprocessError("the kernels do not compile")
            made = Path(scratch) / name
            subprocess.run([compiler, *_FLAGS, "-shared", "-o", made, *objects], check=True, capture_output=True)
            made.rename(library)  # whole or not at all, also if two engines start at once
    return library


def _cpu_features() -> str:
    """A cache folder may be shared by machines; what one was built for may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
