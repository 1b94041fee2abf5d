"""Launch Triton kernels with little host time: all that depends on shapes alone is prepared once for each signature.

A `KernelLaunch` is a kernel with its grid, its numbers and its constants; it is called with tensors. Its first call goes through
Triton, which binds, specialises and compiles. Later calls give the launcher of the compiled kernel the addresses alone:

    @signature_cache                  # of regard.cache: made once for a key
    def prepare(key, x):
        return KernelLaunch(kernel, grid, slots, numbers, constants, x.get_device())

    prepare((*tensor_key(x), x.get_device()), x)(x, y)

What a caller owes: the tensors of all calls of one launch have the same types, shapes and strides, because those are part of the
key, and so is everything else that numbers and constants are computed from. Addresses may differ, also in their alignment: for
addresses that are no multiples of 16 bytes Triton compiles a kernel of its own, so such calls go through Triton every time. So do
calls while launch hooks of Triton are set, calls in its interpreter, and those of versions whose launcher has another form.
Any stream serves, also one that is captured into a CUDA graph, and any device.

`launch_kernel` keeps launches by their arguments, for passes that compute grids and numbers anew in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import reduce
from operator import itemgetter, or_
from typing import Any

import torch
from torch import Tensor

from regard.cache import signature_cache
from regard.transforms import transformed

ALIGNMENT = 16  # bytes; Triton distinguishes addresses that are multiples of it
LAUNCHER_ARGUMENTS = "iiiKKppOOOOOO"  # of a compiled launcher before those of the kernel: the only form that is called directly
_address = Tensor.data_ptr
# Of PyTorch with CUDA alone:
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: device)


def tensor_key(x: Tensor) -> tuple[Hashable, ...]:
    """Return what a launch depends on in a tensor, except its address and its device."""
    return x.shape, x.stride(), x.dtype


_in_graphs: dict[int, Any] = {}  # what CUDA graphs read, by id: kept for ever, because no graph tells when it ends


def hold_for_graphs(x: Tensor, what: Any) -> None:
    """Keep an object whose tensors the current stream reads, if that is captured into a CUDA graph."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        _in_graphs[id(what)] = what


class SharedConstants:
    """Tensors of one device that all later passes read, on any stream and in CUDA graphs; made on the current stream."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors
        self.size = sum(x.numel() for x in tensors)
        first = tensors[0]
        self.device = first.get_device()
        if first.is_cuda:
            self.stream, self.made = _current_stream(self.device), torch.cuda.Event()
            self.made.record(torch.cuda.current_stream(first.device))

    def read(self) -> tuple[Tensor, ...]:
        """Return the tensors, ready for the current stream."""
        first = self.tensors[0]
        if not first.is_cuda:
            return self.tensors
        if torch.cuda.is_current_stream_capturing():  # which began with a wait for all that came before
            hold_for_graphs(first, self)
        elif _current_stream(self.device) != self.stream:
            stream = torch.cuda.current_stream(first.device)
            stream.wait_event(self.made)
            for x in self.tensors:
                x.record_stream(stream)
        return self.tensors


def may_keep(x: Tensor) -> bool:
    """Return whether tensors made now on the device of x may be kept: no tracer is active, and no CUDA graph is captured."""
    if torch.compiler.is_compiling() or transformed():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def present_slots(present: Sequence[bool]) -> tuple[int, ...]:
    """Return the slots of pointer parameters of which some get no tensor: those take the address of the first one.

    The others take the tensors of a call in order.
    """
    given = 0
    found = []
    for there in present:
        found.append(given if there else 0)
        given += there
    return tuple(found)


class KernelLaunch:
    """A kernel with everything but its tensors.

    slots: for each pointer parameter, in order, the number of the tensor that it gets; one that the kernel does not read may get
    any. numbers: the parameters behind the pointers, in order. constants: all others by name, and options such as num_warps.
    device: its number, `x.get_device()`.
    """

    __slots__ = ("_direct", "_kinds", "_spread", "constants", "device", "grid", "kernel", "numbers", "slots")

    def __init__(
        self,
        kernel: Any,
        grid: Sequence[int],
        slots: Sequence[int],
        numbers: Sequence[Any],
        constants: Mapping[str, Any],
        device: int,
    ) -> None:
        self.kernel, self.device = kernel, device
        self.grid, self.slots, self.numbers = tuple(grid), tuple(slots), tuple(numbers)
        self.constants = dict(constants)
        self._spread: Callable[[tuple], tuple] = itemgetter(*slots) if len(self.slots) > 1 else tuple
        self._kinds: tuple[torch.dtype, ...] | None = None  # of the tensors
        self._direct: tuple | None = None  # how to launch without Triton: see `_prepared`

    def __call__(self, *tensors: Tensor) -> None:
        direct = self._direct
        if direct is None:
            self._launch_first(tensors)
            return
        addresses = tuple(map(_address, tensors))
        launch, runtime, grid, middle, tail = direct
        if reduce(or_, addresses) % ALIGNMENT or self.device != _current_device() or _hooked(runtime, self.kernel):
            self._launch_by_triton(tensors)
            return
        launch(*grid, _current_stream(self.device), *middle, *self._spread(addresses), *tail)

    def _launch_first(self, tensors: tuple[Tensor, ...]) -> None:
        """Launch, and keep what Triton compiled if it is for aligned addresses."""
        compiled = self._launch_by_triton(tensors)
        aligned = reduce(or_, map(_address, tensors)) % ALIGNMENT == 0
        if self.device >= 0 and aligned:
            self._direct = self._prepared(compiled)

    def _launch_by_triton(self, tensors: tuple[Tensor, ...]) -> Any:
        """Launch by Triton's own call, on the device of the tensors; return what it compiled."""
        self._check_kinds(tensors)
        if self.device == _current_device():
            return self.kernel[self.grid](*self._spread(tensors), *self.numbers, **self.constants)
        with torch.cuda.device(self.device):
            return self.kernel[self.grid](*self._spread(tensors), *self.numbers, **self.constants)

    def _check_kinds(self, tensors: tuple[Tensor, ...]) -> None:
        """Refuse tensors of other types than those of the first call: the compiled kernel is for those."""
        kinds = tuple(x.dtype for x in tensors)
        if self._kinds is None:
            self._kinds = kinds
        elif kinds != self._kinds:
            raise TypeError(
                f"a launch for tensors of types {self._kinds} was given {kinds}: types belong into the key of a launch"
            )

    def _prepared(self, compiled: Any) -> tuple | None:
        """Return the launcher of a compiled kernel and its constant arguments; None where their form is another one."""
        from triton import knobs
        from triton.backends.nvidia import driver

        run: Any = getattr(compiled, "run", None)
        if type(run) is not driver.CudaLauncher or getattr(driver, "_BASE_ARGS_FORMAT", None) != LAUNCHER_ARGUMENTS:
            return None
        if run.global_scratch_size or run.profile_scratch_size:
            return None
        options = (run.launch_cooperative_grid, run.launch_pdl)
        scratch = hooks = (None, None)
        middle = (compiled.function, *options, *scratch, compiled.packed_metadata, None, *hooks)
        given = len(self.slots) + len(self.numbers)
        rest = (self.constants.get(one.name, one.default) for one in self.kernel.params[given:])
        return run.launch, knobs.runtime, (*self.grid, 1, 1)[:3], middle, (*self.numbers, *rest)


def _hooked(runtime: Any, kernel: Any) -> bool:
    """Return whether something is to be called around launches, such as a profiler of Triton."""
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or kernel.pre_run_hooks)


def launch_kernel(
    kernel: Any, grid: tuple[int, ...], tensors: Sequence[Tensor | None], numbers: Sequence[Any], constants: Mapping[str, Any]
) -> None:
    """Launch a kernel by the `KernelLaunch` of its arguments. A tensor that is None is one that the kernel does not read.

    tensors: the pointer parameters, in order. A number has the same type in all calls: 1 and 1.0 are the same key.
    """
    kinds = tuple([None if x is None else x.dtype for x in tensors])
    given = [x for x in tensors if x is not None]
    numbers = tuple(numbers)
    key = (id(kernel), grid, given[0].get_device(), kinds, numbers, tuple(constants.items()))
    _kept_launch(key, kernel, numbers, constants)(*given)


@signature_cache
def _kept_launch(key: Any, kernel: Any, numbers: tuple, constants: Mapping[str, Any]) -> KernelLaunch:
    _, grid, device, kinds, *_ = key
    return KernelLaunch(kernel, grid, present_slots([kind is not None for kind in kinds]), numbers, constants, device)
