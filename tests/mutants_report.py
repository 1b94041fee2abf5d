"""Defects for `mutants.py`: `regard advise`, and the report of `regard compare`. Each names the tests that must notice it."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

B = "src/regard/bench/"
C = "src/regard/compare/"

REPORT: dict[str, tuple[str, str, str, str]] = {
    "host and device times are one": (B + "step_time.py", "return max(self.host, self.device)", "return self.device", "advise"),
    "a layer counts as the whole": (B + "step_time.py", "(wanted - 1) / (depth - 1)", "wanted / depth", "advise"),
    "the slowest call is the time": (
        B + "step_time.py",
        "            break\n    return min(found)",
        "            break\n    return max(found)",
        "advise",
    ),
    "the old attention stays": (B + "advice.py", "plus(other.minus(own), part.count)", "plus(other, part.count)", "advise"),
    "a model with another mechanism has one layer": (
        B + "advice.py",
        "return deeper(layer, more, *_depths(request))",
        "return layer",
        "advise",
    ),
    "a host that is waited for is free": (
        B + "step_time.py",
        "all(one.host < HOST_FREE * one.device for one in found)",
        "found",
        "advise",
    ),
    "the optimiser is not predicted": (B + "advised_model.py", "        if not optimiser:\n", "        if True:\n", "advise"),
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
    # the report of a comparison
    "seeds are certain": (C + "comparison.py", "STUDENT[degrees - 1] if degrees", "NORMAL if degrees", "report"),
    "the narrower interval is shown": (C + "comparison.py", "low, high, how = max(found", "low, high, how = min(found", "report"),
    "cells that were not chosen are scored": (
        C + "comparison.py",
        "if r.final and r.test is not None])",
        "if r.val is not None])",
        "report",
    ),
    "an earlier learning rate counts": (C + "comparison.py", "best is None or record.lr == best.lr]", "True]", "report"),
    "seeds without a score are not told": (C + "comparison.py", 'if status != "done")', "if False)", "report"),
    "fewer bits are worse": (C + "comparison.py", "score if row.less_is_better else -score, row", "-score, row", "report"),
    "a mechanism wins where it loses": (C + "comparison.py", "theirs / ours) for n", "ours / theirs) for n", "report"),
    "the fastest is taken, whatever it learned": (
        C + "recommendation.py",
        "    timed = [row for row in good if",
        "    timed = [row for row in scored if",
        "report",
    ),
    "a floor is no floor": (C + "recommendation.py", "    if not above_floor(best, task.best_floor):", "    if False:", "report"),
    "a name ends the script": (C + "report_data.py", '.replace("<", "\\\\u003c")', "", "report"),
    "NaN goes into JSON": (C + "report_data.py", "if math.isfinite(value) else None", "if True else None", "report"),
    "a name is markup": (
        C + "report_page.py",
        "first, *others = (escape(cell) for cell in cells)",
        "first, *others = cells",
        "report",
    ),
    "pictures have no limit": (
        C + "report_page.py",
        "MANY_PICTURES, MOST_PICTURES = 160, 480",
        "MANY_PICTURES, MOST_PICTURES = 10**6, 10**6",
        "report",
    ),
    "a checksum of a picture is wrong": (C + "small_png.py", "zlib.crc32(name + content)", "zlib.crc32(content)", "report"),
    "negative weights are not shown": (
        C + "trained_layers.py",
        "adaptive_max_pool2d(matrix.abs()[None]",
        "adaptive_max_pool2d(matrix[None]",
        "report",
    ),
    "attention of a layer sees the future": (
        C + "trained_layers.py",
        "causal=mixer.dims.causal)[0]",
        "causal=False)[0]",
        "report",
    ),
    "a damaged record is passed over in silence": (C + "report.py", "for text in store.damaged]", "for text in ()]", "report"),
}
BROWSER: dict[str, tuple[str, str, str, str]] = {
    "a click filters nothing": (
        C + "report.js",
        '    mark.addEventListener("click", () => only(family));\n',
        "",
        "report_browser",
    ),
    "the address forgets the families": (
        C + "report.js",
        '    if (state.off.size) text.set("off"',
        '    if (false) text.set("off"',
        "report_browser",
    ),
    "tables are not filtered": (
        C + "report.js",
        "part.hidden = state.off.has(part.dataset.family)",
        "part.hidden = false",
        "report_browser",
    ),
    "dots have one size": (C + "report.js", "4 + 20 * Math.sqrt(value / most)", "12", "report_browser"),
    "a phone scrolls sideways": (C + "report.css", ".wide{overflow-x:auto;", ".wide{", "report_browser"),
    "dark is light": (C + "report.css", "--ground:#14161a", "--ground:#fff", "report_browser"),
}

if shutil.which("chromium") and find_spec("playwright"):  # otherwise those tests are skipped, and catch nothing
    REPORT |= BROWSER
