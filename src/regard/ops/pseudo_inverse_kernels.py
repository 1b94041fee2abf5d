"""The iteration for pseudo-inverses in Triton, a matrix a program, in float64: see `regard.ops.pseudo_inverse`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def square_at(n, BN: tl.constexpr):
    """Return the places of the elements of a matrix (n n), and which of them exist."""
    i = tl.arange(0, BN)[:, None]
    j = tl.arange(0, BN)[None, :]
    return i * n + j, (i < n) & (j < n), (i == j).to(tl.float64)


@triton.jit
def product(a, b):
    return tl.dot(a, b, out_dtype=tl.float64)


@triton.jit(do_not_specialize=["n", "iterations"])
def iterate_inverse(S, KEPT, n, iterations, BN: tl.constexpr):
    """Write the estimates of all iterations, KEPT (matrices iterations + 1 n n); the first is S^T / its largest column sum."""
    pid = tl.program_id(0).to(tl.int64)
    at, inside, one = square_at(n, BN)
    s = tl.load(S + pid * n * n + at, mask=inside, other=0.0)
    KEPT += pid * (iterations + 1) * n * n
    z = tl.trans(s) / tl.max(tl.sum(s, 0), 0)
    tl.store(KEPT + at, z, mask=inside)
    for t in range(0, iterations):
        near = product(s, z)
        inner = 15.0 * one - product(near, 7.0 * one - near)
        z = product(z, 13.0 * one - product(near, inner)) * 0.25
        tl.store(KEPT + (t + 1) * n * n + at, z, mask=inside)


@triton.jit(do_not_specialize=["n", "iterations"])
def iterate_inverse_grads(S, KEPT, GRAD, FOUND, n, iterations, BN: tl.constexpr):
    """Write the gradient of a matrix S from that of its last estimate."""
    pid = tl.program_id(0).to(tl.int64)
    at, inside, one = square_at(n, BN)
    s = tl.load(S + pid * n * n + at, mask=inside, other=0.0)
    KEPT += pid * (iterations + 1) * n * n
    dz = tl.load(GRAD + pid * n * n + at, mask=inside, other=0.0)
    ds = tl.zeros([BN, BN], tl.float64)
    for back in range(0, iterations):
        z = tl.load(KEPT + (iterations - 1 - back) * n * n + at, mask=inside, other=0.0)
        near = product(s, z)
        small = 7.0 * one - near
        inner = 15.0 * one - product(near, small)
        outer = 13.0 * one - product(near, inner)
        d_outer = product(tl.trans(z), dz) * -0.25
        turned = tl.trans(near)
        d_inner = product(turned, d_outer)
        d_near = product(d_outer, tl.trans(inner)) - product(d_inner, tl.trans(small)) + product(turned, d_inner)
        ds += product(d_near, tl.trans(z))
        dz = product(dz, tl.trans(outer)) * 0.25 + product(tl.trans(s), d_near)
    sums = tl.sum(s, 0)
    largest = tl.max(sums, 0)
    j = tl.arange(0, BN)
    tops = ((sums == largest) & (j < n)).to(tl.float64)
    ds += tl.trans(dz) / largest
    pull = tl.sum(tl.sum(dz * tl.trans(s), 0), 0) / (largest * largest)
    ds -= pull * (tops / tl.sum(tops, 0))[None, :]
    tl.store(FOUND + pid * n * n + at, ds, mask=inside)
