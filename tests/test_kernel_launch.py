"""Direct launches of compiled kernels: what the launcher of Triton is given, and when Triton itself is called instead."""

from types import SimpleNamespace

import pytest
import torch

from regard import cache
from regard.cache import signature_cache
from regard.ops import kernel_launch
from regard.ops.kernel_launch import LAUNCHER_ARGUMENTS, KernelLaunch, launch_kernel, tensor_key
from regard.ops.triton_support import has_triton, read_tables_again, trial_configs

pytestmark = pytest.mark.skipif(not has_triton(), reason="needs the package triton: pip install triton")
PARAMETERS = ("A", "B", "C", "n", "scale", "BLOCK", "EVEN")


class Recorder:
    """Stand in for a Triton kernel, its compiled form and its driver: count launches and keep their arguments."""

    def __init__(self):
        from triton.backends.nvidia import driver

        self.params = [SimpleNamespace(name=name, default=name == "EVEN") for name in PARAMETERS]
        self.pre_run_hooks, self.by_triton, self.direct = [], [], []
        run = driver.CudaLauncher.__new__(driver.CudaLauncher)
        run.global_scratch_size = run.profile_scratch_size = 0
        run.launch_cooperative_grid, run.launch_pdl = False, True
        run.launch = lambda *args: self.direct.append(args)
        self.compiled = SimpleNamespace(run=run, function=77, packed_metadata=(4, 1, 512))

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.by_triton.append((grid, args, constants))
            return self.compiled

        return launch


@pytest.fixture
def kernel(monkeypatch):
    """A recorded kernel on device 3, whose current stream is 1003."""
    monkeypatch.setattr(kernel_launch, "_current_device", lambda: 3)
    monkeypatch.setattr(kernel_launch, "_current_stream", lambda device: 1000 + device)
    return Recorder()


def prepared(kernel, **other):
    fields = {"grid": (5, 6), "slots": (0, 1, 0), "numbers": (7, 0.5), "constants": {"BLOCK": 64, "num_warps": 4}, "device": 3}
    return KernelLaunch(kernel, **{**fields, **other})


def rows(count=2, dtype=torch.float32):
    return torch.zeros(count, 64, dtype=dtype)


def test_the_second_launch_gives_the_launcher_addresses_numbers_and_constants(kernel):
    launch, x, y = prepared(kernel), rows(), rows()
    launch(x, y)
    assert kernel.by_triton == [((5, 6), (x, y, x, 7, 0.5), {"BLOCK": 64, "num_warps": 4})] and not kernel.direct
    x, y = rows(), rows()
    launch(x, y)
    assert len(kernel.by_triton) == 1
    front = (5, 6, 1, 1003, 77, False, True, None, None, (4, 1, 512), None, None, None)
    assert kernel.direct == [(*front, x.data_ptr(), y.data_ptr(), x.data_ptr(), 7, 0.5, 64, True)]


def test_the_launcher_of_the_installed_triton_takes_these_arguments():
    from triton.backends.nvidia import driver

    text = driver.make_launcher({}, {"A": "*fp32", "n": "i32", "scale": "fp32", "BLOCK": "constexpr"}, None)
    names = (
        "gridX &gridY &gridZ &_stream &_function &launch_cooperative_grid &launch_pdl &global_scratch_obj &profile_scratch_obj"
    )
    order = f"{names} &kernel_metadata &launch_metadata &launch_enter_hook &launch_exit_hook &_arg0 &_arg1 &_arg2 &_arg3"
    assert f'"{LAUNCHER_ARGUMENTS}OidO", &{order.replace(" ", ", ")}' in " ".join(text.split())


def test_addresses_that_are_not_aligned_go_through_triton(kernel):
    launch, x = prepared(kernel), rows()
    shifted = torch.zeros(2 * 64 + 1)[1:].view(2, 64)
    launch(shifted, x)
    launch(x, x)
    assert len(kernel.by_triton) == 2  # what was compiled for the first call serves no other
    launch(x, x)
    launch(shifted, x)
    launch(x, shifted)
    assert len(kernel.by_triton) == 4 and len(kernel.direct) == 1


def test_hooks_and_other_launchers_go_through_triton(kernel, monkeypatch):
    from triton import knobs

    launch, x = prepared(kernel), rows()
    for _ in range(2):
        launch(x, x)
    for hooks in (knobs.runtime.launch_enter_hook.calls, knobs.runtime.launch_exit_hook.calls, kernel.pre_run_hooks):
        hooks.append(print)
        launch(x, x)
        hooks.remove(print)
    assert len(kernel.by_triton) == 4 and len(kernel.direct) == 1
    monkeypatch.setattr(kernel_launch, "LAUNCHER_ARGUMENTS", "iii")
    other = prepared(kernel)
    for _ in range(2):
        other(x, x)
    assert len(kernel.by_triton) == 6 and len(kernel.direct) == 1


def test_scratch_memory_is_allocated_by_triton(kernel):
    kernel.compiled.run.global_scratch_size = 8
    launch, x = prepared(kernel), rows()
    for _ in range(2):
        launch(x, x)
    assert len(kernel.by_triton) == 2


def test_tensors_of_another_device_are_launched_there(kernel, monkeypatch):
    entered = []

    class Guard:
        def __init__(self, number):
            entered.append(number)

        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    launch, x = prepared(kernel), rows()
    for _ in range(2):
        launch(x, x)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(kernel_launch, "_current_device", lambda: 0)
    launch(x, x)
    assert entered == [3] and len(kernel.by_triton) == 2 and len(kernel.direct) == 1


def test_a_launch_refuses_other_types_than_those_of_its_first_call():
    launch = prepared(Recorder(), device=-1)  # as in the interpreter: never direct
    launch(rows(), rows())
    with pytest.raises(TypeError, match="types belong into the key"):
        launch(rows(), rows(dtype=torch.float16))


def test_launches_are_kept_by_their_arguments(kernel, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 3)

    def launch(dtype=torch.float32, number=7, **more):
        x, y = rows(dtype=dtype), rows()
        launch_kernel(kernel, (5,), (None, x, y), (number, 0.5), {"BLOCK": 64, "num_warps": 4, **more})
        return x.data_ptr(), y.data_ptr()

    launch()
    (_, args, _) = kernel.by_triton[0]
    assert args[0] is args[1] and args[0] is not args[2]  # a parameter that is not read takes the first tensor
    x, y = launch()
    assert len(kernel.by_triton) == 1 and kernel.direct[0][13:] == (x, x, y, 7, 0.5, 64, True)
    for other in ({"dtype": torch.float16}, {"number": 8}, {"EVEN": False}):
        launch(**other)
        launch(**other)
    assert len(kernel.by_triton) == 4 and len(kernel.direct) == 4 and kernel.direct[-1][-1] is False


def test_signatures_are_kept_until_configurations_change():
    made = []

    @signature_cache
    def prepare(key, x):
        made.append(key)
        return [x]

    x, y = rows(), rows(3)
    assert prepare(tensor_key(x), x) is prepare(tensor_key(rows()), x) and len(made) == 1
    assert prepare(tensor_key(y), y)[0] is y and len({tensor_key(z) for z in (x, y, x.T, x.half())}) == 4
    for change in (read_tables_again, cache.clear_caches):
        change()
        assert not prepare.kept
        prepare(1, x)
    with trial_configs({}):
        assert not prepare.kept
        prepare(1, x)
    assert not prepare.kept
    prepare(1, x)
    for number in range(cache.MAX_SIGNATURES + 5):
        prepare(number, x)
    assert len(prepare.kept) == cache.MAX_SIGNATURES and number in prepare.kept and 1 not in prepare.kept
