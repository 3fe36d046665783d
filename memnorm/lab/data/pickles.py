"""Read a pickle of arrays, plain containers and plain values, and nothing else.

A pickle is a program: it may name any function and have it called. Here every name it may use leads to a stand-in of
our own, which builds an array from checked parts; numpy's unpickling does not run either. Any other name ends the
reading.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

from memnorm.lab.errors import DataCorrupt

_KINDS = frozenset(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)) | {"f4", "f8", "b1"}
_PLAIN = (type(None), bool, int, float, str, bytes)


def read(content: bytes, name: str) -> Any:
    """The object in a pickle; texts of Python 2 come as bytes. `name` is what an error calls the file."""
    try:
        return _plain(_Reader(io.BytesIO(content), encoding="bytes").load(), {})
    except _Refused as error:
        raise DataCorrupt(
            f"{name}: the pickle asks for {error}, and only arrays and plain containers are read; nothing was run. "
            "Delete the file: it is not part of the data set."
        ) from error
    except Exception as error:  # a damaged pickle may fail in any way
        raise DataCorrupt(f"{name} is not a readable pickle ({type(error).__name__}: {error})") from error


class _Refused(Exception):
    """The pickle wants something that no array and no container needs."""


class _Array:
    """`_reconstruct` makes an empty array; the state that follows gives it shape, kind and content."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _version, shape, dtype, fortran, content = state
        if not all(type(side) is int and side >= 0 for side in shape):
            raise ValueError(f"an array of shape {shape!r}")
        self.value = _numbers(dtype, content).reshape(shape, order="F" if fortran else "C")


class _DType:
    """A kind of number, such as u1; the state that follows gives the order of its bytes."""

    __slots__ = ("code", "order")

    def __init__(self, code: Any) -> None:
        self.code = code.decode("ascii") if isinstance(code, bytes) else code
        self.order = "<"
        if self.code not in _KINDS:
            raise _Refused(f"an array of the type {self.code!r}")

    def __setstate__(self, state: Any) -> None:
        _version, order, *structure = state
        if any(part is not None for part in structure[:3]):
            raise _Refused("an array with fields or sub-arrays")
        self.order = {b"|": "<", "|": "<", b"<": "<", "<": "<", b">": ">", ">": ">"}[order]


def _numbers(dtype: Any, content: Any) -> np.ndarray:
    if not isinstance(dtype, _DType) or not isinstance(content, bytes):
        raise _Refused("an array of something other than plain numbers")
    return np.frombuffer(content, np.dtype(dtype.order + dtype.code))


class _StandIn:
    """What a name in the pickle leads to. Without attributes, so that the pickle cannot change it for the next one."""

    __slots__ = ()


class _Reconstruct(_StandIn):
    __slots__ = ()

    def __call__(self, kind: Any, shape: Any, code: Any) -> _Array:
        if not isinstance(kind, _NdArray):
            raise _Refused("an array of a type of its own")
        return _Array()


class _NdArray(_StandIn):
    """Only an argument of `_reconstruct`: not callable."""

    __slots__ = ()


class _MakeDType(_StandIn):
    __slots__ = ()

    def __call__(self, code: Any, align: Any = False, copy: Any = True) -> _DType:
        return _DType(code)


class _Scalar(_StandIn):
    __slots__ = ()

    def __call__(self, dtype: Any, content: Any = b"") -> Any:
        (number,) = _numbers(dtype, content).tolist()
        return number


class _Encode(_StandIn):
    """Bytes, as Python 3 writes them for Python 2."""

    __slots__ = ()

    def __call__(self, text: Any, encoding: Any = "latin1") -> bytes:
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            raise _Refused(f"the encoding {encoding!r}")
        return text.encode("latin1")


_NAMES: dict[tuple[str, str], _StandIn] = {
    ("numpy", "ndarray"): _NdArray(),
    ("numpy", "dtype"): _MakeDType(),
    ("_codecs", "encode"): _Encode(),
}
for _module in ("numpy.core.multiarray", "numpy._core.multiarray"):  # numpy 1 and 2
    _NAMES[_module, "_reconstruct"] = _Reconstruct()
    _NAMES[_module, "scalar"] = _Scalar()


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _NAMES[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None

    def persistent_load(self, key: Any) -> Any:
        raise _Refused(f"the external object {key!r}")


def _plain(value: Any, done: dict[int, Any]) -> Any:
    """The containers anew, with arrays in the place of their stand-ins; what was shared stays shared."""
    if isinstance(value, _PLAIN):
        return value
    if id(value) in done:
        if done[id(value)] is done:
            raise ValueError("a container holds itself")
        return done[id(value)]
    done[id(value)] = done  # in progress
    if isinstance(value, _Array) and value.value is not None:
        result: Any = value.value
    elif isinstance(value, dict):
        result = {_plain(key, done): _plain(item, done) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        result = type(value)(_plain(item, done) for item in value)
    else:
        raise _Refused(f"an object of the kind {type(value).__name__.strip('_')}")
    done[id(value)] = result
    return result
