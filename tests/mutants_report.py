"""Defects for `mutants.py`: `regard advise`, and the report of `regard compare`. Each names the tests that must notice it."""

from __future__ import annotations

B = "src/regard/bench/"

REPORT: dict[str, tuple[str, str, str, str]] = {
    "host and device times are one": (B + "step_time.py", "return max(self.host, self.device)", "return self.device", "advise"),
    "a layer counts as the whole": (B + "step_time.py", "(wanted - 1) / (depth - 1)", "wanted / depth", "advise"),
    "the slowest call is the time": (B + "step_time.py", "    return min(found)", "    return max(found)", "advise"),
    "the old attention stays": (B + "advice.py", "total.plus(other.minus(own), count)", "total.plus(other, count)", "advise"),
    "one layer is replaced": (B + "advice.py", "count = part.count * frame.repeats", "count = part.count", "advise"),
    "the rest is forgotten": (B + "advice.py", "1e3 * total.total - sum(ms.values())", "0.0", "advise"),
    "weights count as kept tensors": (
        B + "model_parts.py",
        "        found.pop(weight.untyped",
        "        found.get(weight.untyped",
        "advise",
    ),
    "query, key and value become three": (B + "model_parts.py", "    if id(x) not in made:\n", "    if True:\n", "advise"),
    "a part runs forward alone": (
        B + "model_parts.py",
        "        if not training:\n            return\n        outs",
        "        return\n        outs",
        "advise",
    ),
    "a gain within the error is advised": (B + "advice_text.py", "max(WORTH, 1 + (error or 0.0))", "WORTH", "advise"),
    "the host is never blamed": (B + "advice_text.py", 'if row["bound"] == "host":', "if False:", "advise"),
}
