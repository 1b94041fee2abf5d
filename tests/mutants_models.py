"""Defects for `mutants.py`: models, how they speak, and weights of others. Each names the tests that must notice it."""

from __future__ import annotations

M, D, P = "src/regard/models/", "src/regard/decoding/", "src/regard/pretrained/"

MODELS: dict[str, tuple[str, str, str, str]] = {
    # encoder and decoder
    "a decoder reads padding of its source": (
        M + "translator.py",
        "self.decoder(x, target_valid, context=heard.contexts, context_valid=heard.valid)",
        "self.decoder(x, target_valid, context=heard.contexts)",
        "models",
    ),
    "a decoder that speaks reads padding of its source": (
        M + "translator.py",
        "self.decoder.start(context=heard.contexts, context_valid=heard.valid)",
        "self.decoder.start(context=heard.contexts)",
        "models",
    ),
    "wiring each reads the last layer": (
        M + "translator.py",
        "return tuple(normed)",
        "return (normed[-1],) * len(normed)",
        "models",
    ),
    "wiring mixed weighs blocks instead of layers": (M + "translator.py", "softmax(-1)", "softmax(0)", "models"),
    "one vocabulary has two tables": (M + "build.py", "target.table = source.table", "pass", "models_parts"),
    "a translator's output has a table of its own": (
        M + "build.py",
        "NextToken(config.width, target.vocab, table=target.table if config.share else None)",
        "NextToken(config.width, target.vocab)",
        "models_parts",
    ),
    "norms behind parts stand in front": (
        "src/regard/blocks/block.py",
        'mixer.dims.width, mixer.rate, norm == "pre"',
        "mixer.dims.width, mixer.rate, True",
        "blocks",
    ),
    "whoever goes on is a position too far": (
        M + "embed.py",
        "(after.t, after.start)",
        "(after.t + 1, None)",
        "models",
    ),
    "embeddings are not scaled": (M + "embed.py", "math.sqrt(width) if scale else 1.0", "1.0", "models_parts"),
    "something between tokens is not scaled": (
        M + "embed.py",
        "@ self.table.weight * self.scale",
        "@ self.table.weight",
        "scheduled",
    ),
    "the mean of a sequence counts padding": (
        M + "heads.py",
        "total / valid.sum(1, keepdim=True).clamp_min(1)",
        "total / x.shape[1]",
        "models_parts",
    ),
    "an encoder's front is masked like its tokens": (
        M + "encoder.py",
        "valid.new_ones(len(y), len(self.front))",
        "valid[:, :1].expand(-1, len(self.front))",
        "models models_parts",
    ),
    # copying and pointing
    "the gate of a copier is inverted": (
        M + "copying.py",
        "F.logsigmoid(lean).masked_fill(nothing, 0), F.logsigmoid(-lean)",
        "F.logsigmoid(-lean).masked_fill(nothing, 0), F.logsigmoid(lean)",
        "copying",
    ),
    "padding is copied": (M + "copying.py", ".masked_fill(~real, NEVER).log_softmax(-1)", ".log_softmax(-1)", "copying"),
    "heads of a copier are summed": (M + "copying.py", " - math.log(self.point.heads)", "", "copying"),
    "a copier says words of other sources": (M + "copying.py", "logs.masked_fill(lost, -torch.inf)", "logs", "copying"),
    "coverage counts the step itself": (
        M + "copying.py",
        "weights.cumsum(1) - weights)",
        "weights.cumsum(1))",
        "copying",
    ),
    "a pointer points at padding": (
        M + "pointer.py",
        "[:, 0].masked_fill(~choices.real[:, None], -torch.inf)",
        "[:, 0]",
        "pointer",
    ),
    "a monotonic reader goes back": (
        M + "guided.py",
        "return stop[:, :, i] * before\n\n        return scanned(step,",
        "return stop[:, :, i] * before\n\n        return scanned(lambda i, _: step(i, sight.before),",
        "guided",
    ),
    # all at once
    "a slot for every padded vector": (
        M + "parallel.py",
        "self.upsample * read.valid.sum(1, keepdim=True))",
        "self.upsample * torch.full_like(read.valid.sum(1, keepdim=True), n))",
        "parallel",
    ),
    "slots of a vector are as many as vectors": (
        M + "parallel.py",
        "self.upsample * read.valid.sum(1, keepdim=True))",
        "read.valid.sum(1, keepdim=True))",
        "parallel",
    ),
    "the blank is another word": (M + "parallel.py", "BLANK = 0", "BLANK = 1", "parallel"),
    "repeats are not collapsed": (D + "parallel.py", "said[:, 1:] &= path[:, 1:] != path[:, :-1]", "pass", "parallel"),
    "repeats are collapsed across blanks": (
        D + "parallel.py",
        "path[:, 1:] != path[:, :-1]",
        "(path[:, 1:] != path[:, :-1]) & (path[:, 1:] != path.roll(2, 1)[:, 1:])",
        "parallel",
    ),
    "the surest tokens are said again": (
        D + "parallel.py",
        "order.argsort(dim=1, stable=True)",
        "(-order).argsort(dim=1, stable=True)",
        "parallel",
    ),
    "the worst of several lengths is chosen": (D + "parallel.py", "mean.argmax(1)", "mean.argmin(1)", "parallel"),
    "lengths are compared by their sums": (
        D + "parallel.py",
        ".view_as(logs) + logs) / guessed",
        ".view_as(logs) + logs)",
        "parallel",
    ),
    "lengths are learned one too long": (
        M + "lengths.py",
        "(length[:, None] - lengths[:, :1])",
        "(length[:, None] - lengths[:, :1] + 1)",
        "parallel",
    ),
    # beams
    "a length is one too long": (D + "beam.py", "/ (t + 1) ** penalty, t + 1)", "/ (t + 2) ** penalty, t + 1)", "decoding"),
    "beams stop before a longer answer": (
        D + "beam.py",
        "torch.maximum(top / (t + 1) ** penalty, top / rules.most**penalty)",
        "top / (t + 1) ** penalty",
        "decoding",
    ),
    "beams stop when only the best is sure": (
        D + "beam.py",
        "self.ended.scores[:, best - 1]",
        "self.ended.scores[:, 0]",
        "decoding",
    ),
    "beams come from another row": (D + "beam.py", "device=device)[:, None] * width", "device=device)[:, None] * 0", "decoding"),
    "an ended answer goes on": (D + "beam.py", "best.values.masked_fill(ends, -torch.inf).topk", "best.values.topk", "decoding"),
    "beams keep the memory of others": (
        D + "beam.py",
        "state = state.select((groups + parents).flatten(), within=True)",
        "pass",
        "decoding",
    ),
    "the best answers are not sorted": (
        D + "beam.py",
        "Beams(found.tokens[:, :best],",
        "Beams(found.tokens[:, :best].flip(1),",
        "decoding",
    ),
    "an answer that is cut off is lost": (D + "beam.py", "if search.said.shape[2] == rules.most:", "if False:", "decoding"),
    "any of twice the beams may end": (D + "beam.py", "device=said.device) < k)", "device=said.device) < 2 * k)", "decoding"),
    # chance and rules
    "top_p leaves out who crosses it": (
        D + "speak.py",
        "share.cumsum(-1) - share >= self.top_p",
        "share.cumsum(-1) > self.top_p",
        "decoding",
    ),
    "min_p is a share of all": (D + "speak.py", "self.min_p * share.amax(-1, keepdim=True)", "self.min_p", "decoding"),
    "a temperature is inverted": (D + "speak.py", ") / self.temperature", ") * self.temperature", "decoding"),
    "a seed is ignored": (D + "speak.py", "generator=self.dice", "generator=None", "decoding"),
    "dice start anew at every token": (
        D + "speak.py",
        "self.seed is not None and self.dice is None",
        "self.seed is not None",
        "decoding",
    ),
    "the first run may come twice": (
        D + "rules.py",
        "0 < self.no_repeat <= said.shape[1]",
        "0 < self.no_repeat < said.shape[1]",
        "decoding",
    ),
    "runs that may not come twice are longer": (
        D + "rules.py",
        "runs = said.unfold(1, self.no_repeat, 1)  # (x runs no_repeat)\n",
        "self = self._replace(no_repeat=min(self.no_repeat + 1, said.shape[1]))\n"
        "            runs = said.unfold(1, self.no_repeat, 1)\n",
        "decoding",
    ),
    "an answer may end a token too soon": (
        D + "rules.py",
        "said.shape[1] < self.least",
        "said.shape[1] < self.least - 1",
        "decoding",
    ),
    "a row that has ended speaks on": (D + "speak.py", ".masked_fill(over, rules.end)\n", "\n", "decoding"),
    "a ragged prompt is answered at the wrong token": (
        M + "language.py",
        "(torch.arange(x.shape[1], device=x.device) * valid).amax(1)",
        "valid.sum(1) - 1",
        "decoding",
    ),
    # models made ready
    "a desk is not cleaned": (D + "desk.py", "        self.valid.zero_()\n", "        pass\n", "ready"),
    "what is hidden on a desk is no number": (
        D + "desk.py",
        "                side.zero_()\n",
        "                side.fill_(torch.nan)\n",
        "ready",
    ),
    "the price of a slot is forgotten": (D + "graphed.py", "desk.price.index_fill_(3, desk.slot, 0.0)", "pass", "ready"),
    "a ready model hears padding of its source": (
        D + "desk.py",
        "self.heard[i] = (k, v, mask)",
        "self.heard[i] = (k, v, None)",
        "ready",
    ),
    "a graph hears padding of its source": (
        D + "desk.py",
        "_price(mask, price.dtype) if mask is not None else torch.zeros(())",
        "torch.zeros(())",
        "ready",
    ),
    "a ready model counts padding as positions": (D + "ready.py", "desk.table[desk.at]", "desk.table[desk.size]", "ready"),
    "a ready model forgets to reorder": (D + "ready.py", "desk.reorder(talk.rows, desk.size)", "pass", "ready"),
    "a larger desk forgets what is padding": (
        D + "desk.py",
        "self.valid[:, : old.room].copy_(old.valid)",
        "self.valid[:, : old.room] = True",
        "ready",
    ),
    "the end of a vocabulary is not looked at": (
        D + "top.py",
        "torch.arange(v // PART * PART, v,",
        "torch.arange(v, v,",
        "ready",
    ),
    "a captured pass notes nothing": (
        "src/regard/kernels/outside.py",
        "self.read[at] = x.untyped_storage()",
        "pass",
        "graphs",
    ),
    # weights of others
    "maps of GPT-2 are not turned": (P + "recipe.py", "(x.mT if x.dim() == 2 else x)", "(x)", "pretrained"),
    "positions of BART begin at its padding": (P + "families.py", "lambda x: x[2:]", "lambda x: x[:-2]", "pretrained"),
    "gelu is any gelu": (P + "recipe.py", '"gelu_new": "gelu_tanh"', '"gelu_new": "gelu"', "pretrained"),
    "waves take turns": (
        P + "recipe.py",
        "torch.cat([angle.sin(), angle[:, : w // 2].cos()], 1)",
        "torch.stack([angle.sin(), angle[:, : w // 2].cos()], -1).flatten(1)",
        "pretrained",
    ),
    "embeddings of others are not scaled": (
        P + "families.py",
        'scale=told.get("scale_embedding", False)',
        "scale=False",
        "pretrained",
    ),
    "keys and values of GPT-2 are swapped": (
        P + "families.py",
        'conv("attn.c_attn", 1, 3)',
        'conv("attn.c_attn", 2, 3)',
        "pretrained",
    ),
    "a rough look is believed": (
        "src/regard/decoding/sketch.py",
        "rest + U * rest.abs() + self.off < best",
        "rest < best",
        "sketch",
    ),
    "how far a rough look is off forgets the weights": (
        "src/regard/decoding/sketch.py",
        "off = self.off * near.float().norm(dim=1) + ",
        "off = ",
        "sketch",
    ),
}
