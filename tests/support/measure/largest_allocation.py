"""The largest single piece of memory that a stretch of a process asks for, in torch, numpy and Python, on any thread.

Torch tensors are seen by a dispatch mode, which counts for one thread: every thread that starts inside the stretch gets
one of its own, and keeps it. Numpy's arrays and Python's objects are seen by their allocators, replaced for the whole
process by a few native instructions: no lock, no interpreter, nothing that could change what is measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

_HOOKS = """
declare ptr @malloc(i64)
declare ptr @calloc(i64, i64)
declare ptr @realloc(ptr, i64)
declare void @free(ptr)

define ptr @take(ptr %largest, i64 %asked) {
  %size = call i64 @llvm.umax.i64(i64 %asked, i64 1)
  %old = atomicrmw umax ptr %largest, i64 %size monotonic
  %made = call ptr @malloc(i64 %size)
  ret ptr %made
}
define ptr @take_zeros(ptr %largest, i64 %count, i64 %each) {
  %asked = mul i64 %count, %each
  %size = call i64 @llvm.umax.i64(i64 %asked, i64 1)
  %old = atomicrmw umax ptr %largest, i64 %size monotonic
  %made = call ptr @calloc(i64 1, i64 %size)
  ret ptr %made
}
define ptr @take_more(ptr %largest, ptr %there, i64 %asked) {
  %size = call i64 @llvm.umax.i64(i64 %asked, i64 1)
  %old = atomicrmw umax ptr %largest, i64 %size monotonic
  %made = call ptr @realloc(ptr %there, i64 %size)
  ret ptr %made
}
define void @give_back(ptr %largest, ptr %there, i64 %size) {
  call void @free(ptr %there)
  ret void
}
declare i64 @llvm.umax.i64(i64, i64)
"""
_NAMES = ("take", "take_zeros", "take_more", "give_back")
_NUMPY_DEFAULT_HANDLER = 306  #: PyDataMem_DefaultHandler in numpy's table of functions
_RAW = 0  #: PYMEM_DOMAIN_RAW: what is larger than 512 bytes goes there in every domain


class _Allocator(ctypes.Structure):
    """PyMemAllocatorEx, and numpy's PyDataMemAllocator: five words both."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("context", *_NAMES)]


class _Handler(ctypes.Structure):
    """PyDataMem_Handler."""

    _fields_ = [("name", ctypes.c_char * 127), ("version", ctypes.c_uint8), ("allocator", _Allocator)]


@dataclass
class Largest:
    """Bytes. `torch_what` is the operation that made the largest tensor, and the tensor's shape."""

    torch: int = 0
    numpy: int = 0
    python: int = 0
    torch_what: str = ""


class Meter:
    """One per process; `measured` stretches may follow one another."""

    def __init__(self) -> None:
        self.largest = Largest()
        self._numpy, self._python = ctypes.c_uint64(), ctypes.c_uint64()
        self._inside = False
        self._engine = _native()
        addresses = [self._engine.get_function_address(name) for name in _NAMES]
        _hook_numpy(_Allocator(ctypes.addressof(self._numpy), *addresses))
        _hook_python(_Allocator(ctypes.addressof(self._python), *addresses))
        self._follow_threads()

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """What this thread does inside, and what threads started inside do as long as they live."""
        self._numpy.value = self._python.value = 0
        self._inside = True
        try:
            with _Watch(self.largest):
                yield
        finally:
            self._inside = False
            self.largest.numpy = max(self.largest.numpy, self._numpy.value)
            self.largest.python = max(self.largest.python, self._python.value)

    def taken(self) -> Largest:
        """The largest since the last call."""
        found = replace(self.largest)
        for name, nothing in vars(Largest()).items():
            setattr(self.largest, name, nothing)
        return found

    def _follow_threads(self) -> None:
        run, start, meter = threading.Thread.run, threading.Thread.start, self

        def marked(thread: threading.Thread) -> None:
            thread.dcr_watched = meter._inside or getattr(threading.current_thread(), "dcr_watched", False)  # type: ignore[attr-defined]
            start(thread)

        def watched(thread: threading.Thread) -> None:
            if not getattr(thread, "dcr_watched", False):
                return run(thread)
            with _Watch(meter.largest):
                return run(thread)

        threading.Thread.start, threading.Thread.run = marked, watched  # type: ignore[method-assign]


class _Watch(TorchDispatchMode):
    """Every result of every operation of this thread, views aside: they are memory that was there."""

    def __init__(self, largest: Largest) -> None:
        super().__init__()
        self._largest = largest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given and storage.nbytes() > self._largest.torch:
                self._largest.torch = storage.nbytes()
                self._largest.torch_what = f"{func} {tuple(tensor.shape)}"
        return made


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those with memory of their own here: the shards of a DTensor come by themselves."""
    if isinstance(value, torch.Tensor):
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu":
            yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _native() -> llvm.ExecutionEngine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(_HOOKS), machine)
    engine.finalize_object()
    return engine


def _hook_numpy(allocator: _Allocator) -> None:
    """In place, in the handler that every array has by default: numpy's own way to set one counts for one context."""
    from numpy._core import _multiarray_umath

    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = ctypes.cast(pointer(_multiarray_umath._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))
    capsule = ctypes.cast(table[_NUMPY_DEFAULT_HANDLER], ctypes.POINTER(ctypes.py_object)).contents.value
    handler = _Handler.from_address(pointer(capsule, b"mem_handler"))
    assert handler.name == b"default_allocator", handler.name
    handler.allocator = allocator


def _hook_python(allocator: _Allocator) -> None:
    """The allocator behind all others. The libc's, as before: what was allocated earlier can be given back to it.

    `PyMem_SetAllocator` is documented to be called at any time for one that wraps the one before, as this one does.
    """
    ctypes.pythonapi.PyMem_SetAllocator(_RAW, ctypes.byref(allocator))


def _proved(meter: Meter) -> None:
    """It sees what it promises to see, from another thread too; a blind meter would prove anything."""

    def work() -> None:
        torch.zeros(3 << 20, dtype=torch.uint8)
        np.empty(5 << 20, dtype=np.uint8)
        bytes(bytearray(7 << 20))

    with meter.measured():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    seen = meter.taken()
    assert (seen.torch, seen.numpy, seen.python >> 20) == (3 << 20, 5 << 20, 7), seen


def proved_meter() -> Meter:
    meter = Meter()
    _proved(meter)
    return meter
