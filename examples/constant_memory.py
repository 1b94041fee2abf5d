"""Stream a long sequence token by token: the state stays as small as the pattern allows, and nothing changes in the result.

python examples/constant_memory.py
"""

import torch

from regard import layer

torch.manual_seed(0)
x = torch.randn(1, 3000, 64)
for spec in ("softmax", "Local(64) | Global(first=4)", "linear"):
    mixer = layer(spec, width=64, heads=4, causal=True)
    with torch.no_grad():
        whole, state = mixer(x), mixer.start(1)
        _, state = mixer.extend(state, x[:, :1000])  # the prompt at once
        sizes = [state.nbytes]
        for t in range(1000, 3000):
            y, state = mixer.extend(state, x[:, t : t + 1])
            sizes.append(state.nbytes)
    error = (y - whole[:, -1:]).abs().max().item()
    print(
        f"{spec:28s} state {sizes[0] / 1024:7.1f} KiB after the prompt, {sizes[-1] / 1024:7.1f} KiB at the end; error {error:.1e}"
    )
    assert error < 1e-5
