"""Read a pickle of arrays of numbers and plain containers, and nothing else.

A pickle may call any function it names; here it may name a few of ours only. numpy's `allow_pickle` is all or none.
"""

import io
import pickle
import re
from typing import Any

import numpy as np

from memnorm.lab.errors import DataCorrupt


def read(content: bytes, name: str) -> Any:
    """The object in a pickle; strings of Python 2 become bytes. `name` is the file's name in error messages."""
    try:
        return _plain(_Unpickler(io.BytesIO(content), encoding="bytes").load(), {})
    except PermissionError as error:
        refused = f"the pickle asks for {error}, and only arrays and plain containers are read; nothing was run"
        raise DataCorrupt(f"{name}: {refused}. Delete the file: it is not part of the data set.") from error
    except Exception as error:  # a damaged pickle may fail in any way
        raise DataCorrupt(f"{name} is not a readable pickle ({type(error).__name__}: {error})") from error


class _Part:
    """An array or a dtype: what it was made of, and the state that the pickle sets afterwards."""

    def __init__(self, made_of: Any, state: Any = (3, "|")) -> None:
        self.made_of, self.state = made_of, state

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        permitted = {  # new functions for each call: a pickle cannot change them for the next one
            "numpy.ndarray": "ndarray",
            "numpy.dtype": lambda code, *_: _Part(code),
            "numpy.core.multiarray._reconstruct": lambda kind, *_: _Part(kind),
            "numpy.core.multiarray.scalar": lambda dtype, content: _numbers(dtype, content).item(),
            "_codecs.encode": lambda text, encoding: text.encode({"latin1": "latin1"}[encoding]),
        }
        if (found := permitted.get(f"{module}.{name}".replace("numpy._core", "numpy.core"))) is None:
            raise PermissionError(f"{module}.{name}")
        return found


def _numbers(dtype: Any, content: Any) -> np.ndarray:
    code, order = (one.decode() if isinstance(one, bytes) else one for one in (dtype.made_of, dtype.state[1]))
    if not re.fullmatch("[iu][1248]|f[48]|b1", code) or any(dtype.state[2:5]) or not isinstance(content, bytes):
        raise PermissionError(f"an array of the type {code!r}")
    return np.frombuffer(content, np.dtype({"|": "<", "<": "<", ">": ">"}[order] + code))


def _plain(value: Any, done: dict[int, Any]) -> Any:
    """A copy of the containers with arrays in them; shared objects stay shared."""
    if isinstance(value, (type(None), bool, int, float, str, bytes)):
        return value
    if done.get(id(value)) is done:
        raise ValueError("a container holds itself")
    if id(value) not in done:
        done[id(value)] = done  # in progress
        if isinstance(value, dict):
            result: Any = {_plain(key, done): _plain(item, done) for key, item in value.items()}
        elif isinstance(value, (list, tuple)):
            result = type(value)(_plain(item, done) for item in value)
        elif isinstance(value, _Part) and value.made_of == "ndarray" and min(value.state[1], default=0) >= 0:
            _, shape, dtype, fortran, content = value.state
            result = _numbers(dtype, content).reshape(shape, order="F" if fortran else "C")
        else:
            raise PermissionError(f"an object of the kind {type(value).__name__}")
        done[id(value)] = result
    return done[id(value)]
