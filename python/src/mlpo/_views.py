"""Views on a slot: its memory itself, without copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ._native import lib

if TYPE_CHECKING:
    import torch

    _Array = np.ndarray[Any, np.dtype[Any]]
else:
    _Array = np.ndarray

# Name -> code of the C API, numpy type of the same size (numpy has no bfloat16: its bits are shown as uint16).
DTYPES: dict[str, tuple[int, np.dtype[Any]]] = {
    "float32": (lib.MLPO_DTYPE_FLOAT32, np.dtype(np.float32)),
    "float16": (lib.MLPO_DTYPE_FLOAT16, np.dtype(np.float16)),
    "bfloat16": (lib.MLPO_DTYPE_BFLOAT16, np.dtype(np.uint16)),
}


def dtype_of(name: Any) -> str:
    """A dtype's name from itself, from a numpy or a torch dtype."""
    text = str(name)
    if text.startswith("torch."):
        text = text[len("torch.") :]
    if text not in DTYPES:
        try:
            text = np.dtype(name).name
        except TypeError:
            pass
    if text not in DTYPES:
        raise TypeError(f"dtype is {name!r}; offered are {', '.join(DTYPES)}")
    return text


class View(_Array):
    """A part of a slot, as an array of its elements: buffer protocol, indexing, ``numpy()``, ``torch()``.

    The bytes are shared with the daemon, which reads and writes them only between a submission and its completion.
    They stay mapped as long as a view lives, also after the client was closed. A bfloat16 slot is shown as uint16:
    write it by ``torch()`` or as bit patterns.
    """

    element: str = ""

    @staticmethod
    def on(memory: Any, dtype: str, numel: int) -> View:
        """A view on `numel` elements at the beginning of `memory`, which the view keeps."""
        raw = np.frombuffer(memory, dtype=DTYPES[dtype][1], count=numel) if numel else np.empty(0, DTYPES[dtype][1])
        view = raw.view(View)
        view.element = dtype
        return view

    def __array_finalize__(self, source: Any) -> None:
        self.element = getattr(source, "element", "")

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()] if return_scalar else np.asarray(array)  # results of arithmetic are no views on a slot

    def __setitem__(self, index: Any, value: Any) -> None:
        if self.element == "bfloat16" and np.asarray(value).dtype.kind not in "ui":
            raise TypeError("a bfloat16 slot holds bit patterns: assign through .torch(), or uint16 values")
        super().__setitem__(index, value)

    def numpy(self) -> _Array:
        """The same memory as a plain numpy array; uint16 for bfloat16."""
        return self.view(np.ndarray)

    def torch(self) -> torch.Tensor:
        """The same memory as a tensor on the CPU."""
        import torch

        dtype: torch.dtype = getattr(torch, self.element)
        if self.size == 0:
            return torch.empty(0, dtype=dtype)
        if not self.flags.c_contiguous:
            raise ValueError("a view with gaps cannot become a tensor: slice the tensor instead")
        return torch.frombuffer(self, dtype=dtype)
