"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const ALL = "*";
  const SPEED = {train_tokens_per_s: "training, tokens a second", infer_tokens_per_s: "inference, tokens a second", decode_tokens_per_s: "decoding, tokens a second"};
  const MEMORY = {peak_bytes: "of a training step", state_bytes: "of the streaming state", none: "not shown"};
  const CHOICES = {
    cost: {key: "c", values: {step_ms: "training step", forward_ms: "forward pass", peak_bytes: "memory of a step"}},
    training: {key: "y", values: {val: "validation over steps", loss: "training loss over steps", time: "validation over seconds"}},
  };
  const DASHES = ["", "7 3", "2 3", "9 3 2 3", "1 4", "12 4"];
  const families = data.families.map(f => f.name);
  const state = {task: "", x: "train_tokens_per_s", m: "peak_bytes", c: "step_ms", y: "val", s: "", off: new Set()};
  const byId = id => document.getElementById(id);

  // The setting in the fragment of the address
  function readHash() {
    const given = new URLSearchParams(location.hash.slice(1));
    const pick = (key, allowed, usual) => allowed.includes(given.get(key)) ? given.get(key) : usual;
    const names = data.tasks.map(t => t.name);
    state.task = pick("task", names.length > 1 ? [ALL, ...names] : names, names[0]);
    state.x = pick("x", Object.keys(SPEED), "train_tokens_per_s");
    state.m = pick("m", Object.keys(MEMORY), "peak_bytes");
    state.c = pick("c", Object.keys(CHOICES.cost.values), "step_ms");
    state.y = pick("y", Object.keys(CHOICES.training.values), "val");
    state.s = given.get("s") || "";
    state.off = new Set((given.get("off") || "").split(",").filter(f => families.includes(f)));
  }
  function writeHash() {
    const text = new URLSearchParams({task: state.task, x: state.x, m: state.m, c: state.c, y: state.y});
    if (state.s) text.set("s", state.s);
    if (state.off.size) text.set("off", [...state.off].join(","));
    history.replaceState(null, "", "#" + text);
  }
  function change(part) { Object.assign(state, part); writeHash(); draw(); }

  // Words
  const short = v => v == null ? "" : Math.abs(v) >= 1e6 ? (v / 1e6).toPrecision(3) + "M" : Math.abs(v) >= 1e4 ? (v / 1e3).toPrecision(3) + "k" : String(+(+v).toPrecision(3));
  const bytes = v => v == null ? "" : v >= 2 ** 20 ? short(v / 2 ** 20) + " MiB" : short(v / 1024) + " KiB";
  const taskOf = name => data.tasks.find(t => t.name === name);
  const less = task => task && task.metric === "bits per token";
  const score = (v, metric) => v == null ? "" : metric === "accuracy" ? (100 * v).toFixed(1) + " %" : short(v);
  function settingsText(r) {
    const c = r.costs, lines = [r.mixer + " (" + r.family + ")", taskOf(r.task).label];
    lines.push("test " + r.metric + " " + score(r.score, r.metric) + (r.low == null ? "" : " (" + score(r.low, r.metric) + " to " + score(r.high, r.metric) + ", " + r.interval + ")"));
    lines.push("lr " + short(r.lr) + ", " + r.scores.length + (r.scores.length > 1 ? " seeds" : " seed") + (r.parameters == null ? "" : ", " + r.parameters.toLocaleString("en") + " parameters"));
    if (r.note) lines.push(r.note);
    if (c.train_tokens_per_s) lines.push("training " + short(c.train_tokens_per_s) + " tokens/s" + (r.ratios.train_tokens_per_s ? ", " + r.ratios.train_tokens_per_s.toFixed(2) + " x softmax" : ""));
    if (c.infer_tokens_per_s) lines.push("inference " + short(c.infer_tokens_per_s) + " tokens/s");
    if (c.decode_ms) lines.push("decoding " + short(c.decode_ms) + " ms a token");
    if (c.peak_bytes) lines.push("memory of a step " + bytes(c.peak_bytes));
    if (c.state_bytes) lines.push("state " + bytes(c.state_bytes));
    return lines.join("\n");
  }

  // Drawing
  function node(name, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text != null) made.textContent = text;
    return made;
  }
  const colour = family => "--c:var(--f" + families.indexOf(family) + ")";
  function ticksOf(low, high, log) {
    if (log) {
      const found = [], many = Math.log10(high / low) > 2.2;
      for (let d = Math.floor(Math.log10(low)); d <= Math.ceil(Math.log10(high)); d++)
        for (const m of many ? [1] : [1, 2, 5]) if (m * 10 ** d >= low * .999 && m * 10 ** d <= high * 1.001) found.push(m * 10 ** d);
      if (found.length > 2) return found;
    }
    const raw = (high - low) / 6.5 || 1, unit = 10 ** Math.floor(Math.log10(raw)), step = unit * [1, 2, 5, 10].find(m => m * unit >= raw);
    const found = [];
    for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-6; v += step) found.push(+v.toPrecision(12));
    return found;
  }
  function scale(values, from, to, axis) {
    const known = values.filter(v => v != null && isFinite(v) && (!axis.log || v > 0));
    let low = Math.min(...known), high = Math.max(...known);
    const f = axis.log ? Math.log : v => v;
    if (low === high) { low = axis.log ? low / 1.5 : low - (Math.abs(low) * .1 || .5); high = axis.log ? high * 1.5 : high + (Math.abs(high) * .1 || .5); }
    let a = f(low), b = f(high);
    const pad = (b - a) * (axis.pad || .06);
    a -= pad; b += pad;
    const made = v => from + (f(v) - a) / (b - a) * (to - from);
    const back = axis.log ? Math.exp : v => v;
    made.ticks = axis.ticks || ticksOf(back(a), back(b), axis.log);
    return made;
  }
  // o: {x, y: {log, label, text, ticks, reversed}, series: [{name, family, line, points: [{x, y, r, low, high, tip, row}]}], floors}
  function chart(host, o) {
    host.replaceChildren();
    o.series.sort((a, b) => (b.points[0]?.r || 0) - (a.points[0]?.r || 0)); // small dots lie on large ones
    const points = o.series.flatMap(s => s.points);
    if (!points.length) { host.textContent = "Nothing was measured for this choice."; host.classList.add("quiet"); return; }
    host.classList.remove("quiet");
    const width = Math.max(280, host.clientWidth), height = Math.round(Math.min(460, Math.max(260, width * .5)));
    const lines = o.series.some(s => s.line), left = 56, right = lines && o.names && width > 640 ? 150 : 14, top = 26, bottom = 44;
    const svg = node("svg", {viewBox: "0 0 " + width + " " + height, width, height, xmlns: "http://www.w3.org/2000/svg"});
    const x = scale(points.map(p => p.x), left, width - right, o.x);
    const ys = points.flatMap(p => [p.y, p.low, p.high]).concat((o.floors || []).map(f => f.y));
    const y = o.y.reversed ? scale(ys, top, height - bottom, o.y) : scale(ys, height - bottom, top, o.y);
    for (const t of y.ticks) {
      svg.append(node("line", {class: "grid", x1: left, x2: width - right, y1: y(t), y2: y(t)}));
      svg.append(node("text", {x: left - 6, y: y(t) + 4, "text-anchor": "end"}, o.y.text(t)));
    }
    let last = -99;
    for (const t of x.ticks) {
      if (x(t) - last < 34) continue;
      last = x(t);
      svg.append(node("text", {x: x(t), y: height - bottom + 16, "text-anchor": "middle"}, o.x.text(t)));
    }
    svg.append(node("text", {x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle"}, o.x.label));
    svg.append(node("text", {x: 2, y: 11, "text-anchor": "start"}, o.y.label));
    for (const f of o.floors || []) {
      svg.append(node("line", {class: "floor", x1: left, x2: width - right, y1: y(f.y), y2: y(f.y)}));
      svg.append(node("text", {x: width - right, y: y(f.y) - 4, "text-anchor": "end"}, f.name));
    }
    const used = {}, labels = [];
    for (const s of o.series) {
      const dash = DASHES[(used[s.family] = (used[s.family] ?? -1) + 1) % DASHES.length];
      const shown = s.points.filter(p => p.y != null && (!o.x.log || p.x > 0) && (!o.y.log || p.y > 0));
      if (s.line && shown.length > 1)
        svg.append(node("path", {class: "line", style: colour(s.family), "stroke-dasharray": dash, d: shown.map((p, i) => (i ? "L" : "M") + x(p.x).toFixed(1) + " " + y(p.y).toFixed(1)).join("")}));
      for (const p of shown) {
        if (p.low != null && p.high != null) svg.append(node("line", {class: "bar", style: colour(s.family), x1: x(p.x), x2: x(p.x), y1: y(p.low), y2: y(p.high)}));
        const mark = node("circle", {class: "mark", style: colour(s.family), cx: x(p.x).toFixed(1), cy: y(p.y).toFixed(1), r: p.r || 3.5, "data-family": s.family, "data-name": s.name, tabindex: s.line ? -1 : 0, role: "button", "aria-label": p.tip});
        follow(mark, p.tip, s.family);
        svg.append(mark);
      }
      const end = shown[shown.length - 1];
      if (o.names && end) labels.push({x: x(end.x) + (end.r || 4) + 3, y: y(end.y) + 3, text: s.name.length > 26 ? s.name.slice(0, 25) + "…" : s.name, p: end});
    }
    const taken = [];
    for (const l of labels) {
      const w = l.text.length * 5.6;
      let box = {a: l.x, b: l.x + w, c: l.y - 9, d: l.y + 3};
      if (box.b > width) box = {a: l.x - w - 2 * (l.p.r || 4) - 6, b: l.x - 2 * (l.p.r || 4) - 6, c: box.c, d: box.d};
      if (box.a < left || taken.some(t => box.a < t.b && box.b > t.a && box.c < t.d && box.d > t.c)) continue;
      taken.push(box);
      svg.append(node("text", {class: "name", x: box.a, y: l.y}, l.text));
    }
    host.append(svg);
  }

  // The box with the settings, and the filter by a click
  const tip = byId("tip");
  function place(px, py) {
    const w = tip.offsetWidth, h = tip.offsetHeight;
    tip.style.left = Math.max(4, Math.min(px + 14, innerWidth - w - 4)) + "px";
    tip.style.top = Math.max(4, py + h + 20 > innerHeight ? py - h - 12 : py + 14) + "px";
  }
  function follow(mark, text, family) {
    const show = (px, py) => { tip.textContent = text; tip.hidden = false; place(px, py); };
    mark.addEventListener("pointerenter", e => show(e.clientX, e.clientY));
    mark.addEventListener("pointerleave", () => { tip.hidden = true; });
    mark.addEventListener("focus", () => { const r = mark.getBoundingClientRect(); show(r.right, r.bottom); });
    mark.addEventListener("blur", () => { tip.hidden = true; });
    mark.addEventListener("click", () => only(family));
    mark.addEventListener("keydown", e => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); only(family); } });
  }
  function only(family) {
    tip.hidden = true;
    const alone = families.length - state.off.size === 1 && !state.off.has(family);
    change({off: alone ? new Set() : new Set(families.filter(f => f !== family))});
  }

  // Figures
  const shownRows = () => data.rows.filter(r => !state.off.has(r.family) && (state.task === ALL || r.task === state.task));
  const area = (value, most) => value == null || !most ? 5 : 4 + 20 * Math.sqrt(value / most);
  function bubble(host) {
    const speed = {log: true, label: SPEED[state.x], text: short};
    if (state.task === ALL) return bubbleOfAll(host, speed);
    const task = taskOf(state.task), rows = shownRows().filter(r => r.score != null && r.costs[state.x]);
    const most = Math.max(0, ...data.rows.filter(r => r.task === state.task).map(r => r.costs[state.m] || 0));
    chart(host, {names: true, x: speed, y: {label: "test " + task.metric + (less(task) ? " (less is better, axis reversed)" : ""), text: v => score(v, task.metric), reversed: less(task)},
      floors: task.best_floor == null ? [] : [{y: task.best_floor, name: "best floor"}],
      series: rows.map(r => ({name: r.mixer, family: r.family, points: [{x: r.costs[state.x], y: r.score, low: r.low, high: r.high, r: state.m === "none" ? 6 : area(r.costs[state.m], most), tip: settingsText(r)}]}))});
  }
  function bubbleOfAll(host, speed) {
    const found = new Map();
    for (const task of data.tasks) {
      const rows = data.rows.filter(r => r.task === task.name && r.score != null);
      const best = rows.length ? rows[0].score : null, floor = task.best_floor ?? 0;
      if (!task.learned) continue; // between its floor and its best score there is no scale
      for (const r of rows) {
        const own = found.get(r.mixer) || {family: r.family, parts: [], speeds: [], memory: []};
        own.parts.push((r.score - floor) / (best - floor));
        if (r.costs[state.x]) own.speeds.push(r.costs[state.x]);
        own.memory.push(r.costs[state.m] || 0);
        found.set(r.mixer, own);
      }
    }
    const wanted = Math.max(0, ...[...found.values()].map(o => o.parts.length)), mean = v => v.reduce((a, b) => a + b, 0) / v.length;
    const whole = [...found].filter(([, o]) => o.parts.length === wanted && o.speeds.length === wanted && !state.off.has(o.family));
    const most = Math.max(0, ...whole.map(([, o]) => mean(o.memory)));
    chart(host, {names: true, x: speed, y: {label: "mean over " + wanted + " tasks: 0 is the best floor, 1 the best mixer", text: short}, series: whole.map(([name, o]) => {
      const rate = Math.exp(mean(o.speeds.map(Math.log))), value = mean(o.parts);
      return {name, family: o.family, points: [{x: rate, y: value, r: area(mean(o.memory), most), tip: name + " (" + o.family + ")\nmean " + value.toFixed(3) + " over " + wanted + " tasks\n" + short(rate) + " " + SPEED[state.x]}]};
    })});
  }
  function cost(host) {
    const rows = shownRows().filter(r => r.by_length.length), size = state.c === "peak_bytes";
    const lengths = [...new Set(rows.flatMap(r => r.by_length.map(p => p.n)))].sort((a, b) => a - b);
    chart(host, {names: true, x: {log: true, label: "tokens of a sequence", text: v => v.toLocaleString("en"), ticks: lengths}, y: {log: true, label: size ? "bytes" : "ms", text: size ? bytes : short},
      series: rows.map(r => ({name: r.mixer, family: r.family, line: true, points: r.by_length.filter(p => p[state.c]).map(p => ({x: p.n, y: p[state.c], tip: r.mixer + ", n = " + p.n.toLocaleString("en") + ", batch " + p.batch + "\n" + (size ? bytes(p[state.c]) : short(p[state.c]) + " ms") + "\n" + (r.wins_from ? "a training step beats softmax from about n = " + Math.round(r.wins_from).toLocaleString("en") : "")}))}))});
    const wins = rows.filter(r => r.wins_from != null).map(r => r.mixer + " from " + Math.round(r.wins_from).toLocaleString("en"));
    host.parentElement.querySelector(".note").textContent = wins.length ? "A training step is faster than that of softmax: " + wins.join(", ") + "." : "";
  }
  function rates(host) {
    const rows = shownRows().filter(r => r.rates.some(p => p[1] != null));
    const task = taskOf(rows.length ? rows[0].task : state.task);
    chart(host, {names: true, x: {log: true, label: "learning rate", text: v => v.toExponential().replace("e-", "e−")}, y: {label: "validation" + (task ? ", " + task.metric : ""), text: v => score(v, task && task.metric), reversed: less(task)},
      series: rows.map(r => ({name: r.mixer, family: r.family, line: true, points: r.rates.filter(p => p[1] != null).map(p => ({x: p[0], y: p[1], r: p[0] === r.lr ? 5.5 : 3, tip: r.mixer + ", lr " + short(p[0]) + "\nvalidation " + score(p[1], r.metric) + (p[0] === r.lr ? "\nchosen" : "")}))}))});
    const lost = shownRows().flatMap(r => r.rates.filter(p => p[1] == null).map(p => r.mixer + " at " + short(p[0]) + ": " + p[2]));
    host.parentElement.querySelector(".note").textContent = lost.join(", ");
  }
  function training(host) {
    const rows = shownRows().filter(r => r.curve.length), loss = state.y === "loss", time = state.y === "time";
    const task = taskOf(rows.length ? rows[0].task : state.task), metric = loss ? "" : task && task.metric;
    chart(host, {names: true, x: {label: time ? "seconds of training" : "steps", text: short}, y: {label: loss ? "training loss" : "validation" + (task ? ", " + task.metric : ""), text: v => score(v, metric), reversed: !loss && less(task)},
      series: rows.map(r => ({name: r.mixer, family: r.family, line: true, points: r.curve.map(p => ({x: time ? p[3] : p[0], y: loss ? p[1] : p[2], r: 2.5, tip: r.mixer + ", step " + p[0] + ", " + short(p[3]) + " s\nloss " + short(p[1]) + "\nvalidation " + score(p[2], r.metric)}))}))});
  }
  function slices(host) {
    const rows = shownRows().filter(r => Object.keys(r.slices).length);
    const names = [...new Set(rows.flatMap(r => Object.keys(r.slices)))];
    const name = names.includes(state.s) ? state.s : names[0];
    choose(host, "s", Object.fromEntries(names.map(n => [n, n])), name);
    const own = rows.filter(r => r.slices[name]), task = taskOf(own.length ? own[0].task : state.task);
    const values = [...new Set(own.flatMap(r => Object.keys(r.slices[name])))];
    const numeric = values.every(v => v !== "" && isFinite(parseFloat(v)));
    if (numeric) values.sort((a, b) => parseFloat(a) - parseFloat(b));
    chart(host, {names: true, x: {label: name || "", text: i => values[i] ?? "", ticks: values.map((_, i) => i)}, y: {label: "test" + (task ? " " + task.metric : ""), text: v => score(v, task && task.metric), reversed: less(task)},
      series: own.map(r => ({name: r.mixer, family: r.family, line: true, points: values.map((v, i) => ({x: i, v, at: r.slices[name][v]})).filter(p => p.at).map(p => ({x: p.x, y: p.at[0], low: p.at[2], high: p.at[3], tip: r.mixer + "\n" + name + " " + p.v + ": " + score(p.at[0], r.metric) + (p.at[2] == null ? "" : " (" + score(p.at[2], r.metric) + " to " + score(p.at[3], r.metric) + ")") + ", " + p.at[1].toLocaleString("en") + " targets"}))}))});
  }
  function spectrum(host) {
    const rows = data.spectra.filter(s => !state.off.has(s.family) && (state.task === ALL || s.task === state.task));
    chart(host, {names: true, x: {label: "share of the singular values", text: v => Math.round(100 * v) + " %"}, y: {label: "share of their sum", text: v => Math.round(100 * v) + " %"},
      series: rows.map(s => ({name: s.mixer + ", layer " + s.layer, family: s.family, line: true, points: s.share.map((v, i) => ({x: (1 + i * (s.tokens - 1) / Math.max(1, s.share.length - 1)) / s.tokens, y: v, r: 1.6, tip: s.mixer + ", layer " + s.layer + ", " + s.tokens + " tokens\n" + (100 * v).toFixed(1) + " % of the sum"}))}))});
  }

  // Settings
  function options(select, values, chosen, key) {
    select.replaceChildren(...Object.entries(values).map(([value, text]) => Object.assign(document.createElement("option"), {value, textContent: text, selected: value === chosen})));
    select.onchange = () => change({[key]: select.value});
  }
  function choose(host, key, values, chosen) {
    const slot = host.parentElement.querySelector(".choice");
    const select = slot.firstChild || slot.appendChild(document.createElement("select"));
    select.setAttribute("aria-label", "What is shown");
    options(select, values, chosen, key);
  }
  function chips() {
    byId("families").replaceChildren(...families.map(name => {
      const made = Object.assign(document.createElement("button"), {type: "button", textContent: name});
      made.style.cssText = colour(name);
      made.setAttribute("aria-pressed", String(!state.off.has(name)));
      made.onclick = () => {
        const off = new Set(state.off);
        off.has(name) ? off.delete(name) : off.add(name);
        change({off});
        byId("families").children[families.indexOf(name)].focus();
      };
      return made;
    }));
  }
  function csv() {
    const keys = ["task", "mixer", "family", "metric", "score", "low", "high", "val", "lr", "parameters", "lost", "wins_from", "wins_from_forward", "reason"];
    const costs = ["n", "batch", "train_steps_per_s", "train_tokens_per_s", "infer_tokens_per_s", "decode_ms", "peak_bytes", "state_bytes"];
    const cell = v => { const t = v == null ? "" : String(v); return /[",\n]/.test(t) ? '"' + t.replaceAll('"', '""') + '"' : t; };
    const lines = [[...keys, ...costs].join(","), ...data.rows.map(r => [...keys.map(k => r[k]), ...costs.map(k => r.costs[k])].map(cell).join(","))];
    const link = Object.assign(document.createElement("a"), {href: URL.createObjectURL(new Blob([lines.join("\n")], {type: "text/csv"})), download: "comparison.csv"});
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
  const figures = {bubble, cost, rates, training, slices, spectrum};
  function draw() {
    const names = Object.fromEntries(data.tasks.map(t => [t.name, t.label]));
    options(byId("task"), data.tasks.length > 1 ? {[ALL]: "all tasks", ...names} : names, state.task, "task");
    options(byId("speed"), SPEED, state.x, "x");
    options(byId("memory"), MEMORY, state.m, "m");
    chips();
    for (const [name, one] of Object.entries(CHOICES)) choose(byId(name).querySelector(".chart"), one.key, one.values, state[one.key]);
    for (const [name, figure] of Object.entries(figures)) figure(byId(name).querySelector(".chart"));
    for (const part of document.querySelectorAll("[data-family]:not(circle)")) part.hidden = state.off.has(part.dataset.family) || (part.dataset.task != null && state.task !== ALL && part.dataset.task !== state.task);
    for (const part of document.querySelectorAll("section.of-task")) part.hidden = state.task !== ALL && part.dataset.task !== state.task;
    for (const row of document.querySelectorAll("tr[data-family] i")) row.style.cssText = colour(row.closest("tr").dataset.family);
  }
  byId("all").onclick = () => change({off: new Set()});
  byId("csv").onclick = csv;
  addEventListener("hashchange", () => { readHash(); draw(); });
  let waiting = 0, wide = innerWidth;
  addEventListener("resize", () => { if (innerWidth === wide) return; wide = innerWidth; clearTimeout(waiting); waiting = setTimeout(draw, 120); });
  readHash();
  draw();
  document.documentElement.dataset.ready = "1";
})();
