"""What a process keeps between calls: made in inference mode it serves training, and it survives forks and interruptions."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from conftest import CASES, DEVICE, HEADS, WIDTH, Case, data, every, modes, some
from regard import Dims, Places, cache
from regard.mixers.base import Can
from regard.ops import edge
from regard.ops.tile import buffers, head_pieces, tile_op
from regard.patterns import Local, Random, drawn, edge_list, plan
from regard.patterns.tiles import Span
from regard.positions import POSITIONS, positions


def forget_all():
    """As in a new process."""
    cache.clear_caches()


def test_clear_caches_frees_plans_tables_and_buffers():
    """Of all threads; and results stay what they were."""
    q = torch.randn(1, 2, 64, 8)
    patterns = tile_op.HeadPatterns.of(Local(5) | Random(1, 4, past=True), 2)

    def run():
        edge._parsed_pattern("Local(3)")
        edge_list.edge_list(Local(3), Span(0, 9, 0, 9), True, torch.device("cpu"))
        tile_op.heads_by_plan_of_text("Local(3)", 2, Span(0, 9, 0, 9), True)
        return tile_op.tile_attention(q, q, q, patterns, Span(0, 64, 0, 64), scale=0.3)[0]

    def sizes():
        plans = (plan.plan, edge_list.edge_list, tile_op.heads_by_plan, tile_op.heads_by_plan_of_text)
        tables = (edge._parsed_pattern, drawn._draw_blocks, head_pieces.split_heads)
        scratch = sum(len(one.flat) for one in buffers._every_scratch)
        return [len(f.kept) for f in plans] + [f.cache_info().currsize for f in tables] + [scratch]

    before = run()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()
        assert all(sizes()) and len(buffers._every_scratch) > 1
        cache.clear_caches()
        assert not any(sizes())
    assert torch.equal(run(), before)


TOLERANCE = 0 if DEVICE.type == "cpu" else 1e-12  # a GPU may add up in another order


def gradients(made, x, run):
    x = x.clone().requires_grad_()
    y = run(made, x)
    return torch.autograd.grad(y.square().sum(), [x, *made.parameters()], allow_unused=True)


def check_trains_after_evaluation(build, x, run):
    forget_all()
    never = gradients(build(), x, run)
    forget_all()
    same = build()
    with torch.inference_mode():
        run(same, x)
    for made in (same, build()):
        for a, b in zip(gradients(made, x, run), never, strict=True):
            if a is not None or b is not None:
                torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)


@every
def test_evaluation_in_inference_mode_leaves_training_as_it_was(case):
    for mode in modes(case):
        check_trains_after_evaluation(partial(case.build, **mode), data(37, b=2), lambda made, x: made(x))
        if case.can(Can.PADDING, **mode):
            padded = partial(lambda valid, made, x: made(x, valid=valid), some(2, 37))
            check_trains_after_evaluation(partial(case.build, **mode), data(37, b=2), padded)


@pytest.mark.parametrize("name", [name for name in POSITIONS if name not in ("rotary", "relative", "alibi")])
def test_positions_evaluated_in_inference_mode_train_as_before(name):
    def build():
        torch.manual_seed(0)
        return positions(name, Dims(WIDTH, HEADS, max_len=64)).to(DEVICE, torch.float64)

    check_trains_after_evaluation(build, data(21, b=2), lambda made, x: made.add(x, Places.of(x)))


@pytest.mark.parametrize("case", [c for c in CASES if c.can(Can.STREAM, causal=True)], ids=repr)
def test_a_state_of_inference_mode_goes_on_without_gradients(case: Case):
    made, x = case.build(causal=True), data(29, b=2)
    with torch.no_grad():
        truth = made(x)
        with torch.inference_mode():
            state = made.extend(made.start(2), x[:, :20])[1]
            state = made.extend(state, x[:, 20:23])[1]  # into the room that a log has to spare
        found = []
        for i in range(23, 29):
            y, state = made.extend(state, x[:, i : i + 1])
            found.append(y)
    torch.testing.assert_close(torch.cat(found, 1), truth[:, 23:], rtol=1e-9, atol=1e-9)


def test_an_interrupted_call_leaves_nothing_behind():
    calls = []

    @cache.bounded_cache(lambda _: 1)
    def made(x):
        calls.append(x)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return x + 1

    with pytest.raises(KeyboardInterrupt):
        made(1)
    assert not made.kept and made(1) == made(1) == 2 and len(calls) == 2


def _child(queue):
    queue.put(edge_list.edge_list(Local(3), Span(0, 11, 0, 11), True, torch.device("cpu")).sum().item())


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_waits_for_the_lock_and_its_child_finds_it_free():
    """Without that, a child forked while another thread holds the lock would wait for ever."""
    import os
    import threading
    import time

    held, context = threading.Event(), multiprocessing.get_context("fork")

    def hold():
        with cache._cache_lock:
            held.set()
            time.sleep(0.5)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    queue = context.Queue()
    child = context.Process(target=_child, args=(queue,))
    child.start()
    thread.join()
    child.join(20)
    if alive := child.is_alive():
        os.kill(child.pid, 9)
    assert not alive and child.exitcode == 0
    assert queue.get(timeout=5) == edge_list.edge_list(Local(3), Span(0, 11, 0, 11), True, torch.device("cpu")).sum().item()
