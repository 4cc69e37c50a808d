"use strict";
// Elements, the tooltip, and drawings in SVG. Texts are set as text, never as markup.

function element(name, attributes = {}, ...children) {
  const isSvg = element.svg.has(name);
  const made = isSvg
    ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
element.svg = new Set(["svg", "g", "rect", "line", "path", "circle", "text"]);

const tip = {
  show(event, text) {
    const box = document.getElementById("tip");
    box.textContent = text;
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const left = event.clientX + 14 + width > innerWidth ? event.clientX - 14 - width : event.clientX + 14;
    const top = event.clientY + 14 + height > innerHeight ? event.clientY - 14 - height : event.clientY + 14;
    box.style.left = `${Math.max(left, 0)}px`;
    box.style.top = `${Math.max(top, 0)}px`;
  },
  hide() {
    document.getElementById("tip").hidden = true;
  },
  on(target, text) {
    target.addEventListener("pointermove", (event) => tip.show(event, text));
    target.addEventListener("pointerleave", tip.hide);
  },
};

/** Round numbers from `from` to `to`, about `count` of them. */
function ticks(from, to, count) {
  const rough = (to - from) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const found = [];
  for (let n = Math.ceil(from / step - 1e-9); n * step <= to * (1 + 1e-9); n++) {
    found.push(Number((n * step).toPrecision(12)));
  }
  return found;
}

/** Up to four digits, with thousands apart. */
function figure(value) {
  return value.toLocaleString("en", { maximumSignificantDigits: 4 });
}

function gigabytes(bytes) {
  return bytes >= 1e8 ? `${(bytes / 1e9).toFixed(2)} GB` : `${(bytes / 1e6).toFixed(2)} MB`;
}

function milliseconds(ns) {
  return `${figure(ns / 1e6)} ms`;
}

function table(head, rows) {
  const cells = (name, row) => element("tr", {}, ...row.map((text) => element(name, {}, text)));
  const body = element("tbody", {}, ...rows.map((row) => cells("td", row)));
  return element("div", { class: "wide" },
    element("table", {}, element("thead", {}, cells("th", head)), body));
}

/** A key of a legend. `draw` gives the SVG elements of a box of 24 by 12. */
function key(text, ...drawn) {
  return element("span", { class: "key" },
    element("svg", { viewBox: "0 0 24 12", "aria-hidden": "true" }, ...drawn), text);
}

function box(fill) {
  return element("rect", { width: 24, height: 12, rx: 2, fill });
}

/** Axes of a chart: the SVG and the maps from values to its coordinates. */
function axes({ width = 560, height = 250, x, y, xLabel, yLabel, xText = figure, label }) {
  const left = 72, right = width - 14, top = 12, bottom = height - 38;
  const svg = element("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  const toX = (value) => left + ((value - x[0]) / (x[1] - x[0] || 1)) * (right - left);
  const toY = (value) => bottom - ((value - y[0]) / (y[1] - y[0] || 1)) * (bottom - top);
  for (const value of ticks(...y, 5)) {
    svg.append(
      element("line", { x1: left, x2: right, y1: toY(value), y2: toY(value), stroke: "var(--line)" }),
      element("text", { x: left - 6, y: toY(value) + 4, "text-anchor": "end" }, figure(value)));
  }
  for (const value of ticks(...x, 6)) {
    svg.append(element("text", { x: toX(value), y: bottom + 16, "text-anchor": "middle" }, xText(value)));
  }
  svg.append(
    element("text", { x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, xLabel),
    element("text", { x: -(top + bottom) / 2, y: 12, transform: "rotate(-90)", "text-anchor": "middle" }, yLabel));
  return { svg, toX, toY, left, right, top, bottom, width };
}

/** Curves over batches. Of each: name, points, color, and whether it isDashed or has dots. */
function lineChart({ curves, yLabel, label, from }) {
  const points = curves.flatMap((curve) => curve.points);
  const ys = points.map(([, value]) => value);
  const low = from === undefined ? Math.min(...ys) : from, high = Math.max(...ys);
  const x = [Math.min(...points.map(([at]) => at)), Math.max(...points.map(([at]) => at))];
  const chart = axes({ x, y: [low, high + (high - low) * 0.05 || 1], xLabel: "batch", yLabel, label });
  for (const { points: curve, color, isDashed, hasDots } of curves) {
    const path = curve.map(([at, value], n) => `${n ? "L" : "M"}${chart.toX(at).toFixed(1)} ${chart.toY(value).toFixed(1)}`);
    chart.svg.append(element("path", {
      d: path.join(""), fill: "none", stroke: color, "stroke-width": 1.6, "stroke-dasharray": isDashed ? "6 4" : "none",
    }));
    if (hasDots) {
      for (const [at, value] of curve) {
        chart.svg.append(element("circle", { cx: chart.toX(at), cy: chart.toY(value), r: 3.5, fill: color }));
      }
    }
  }
  const cursor = element("line", { y1: chart.top, y2: chart.bottom, stroke: "var(--mark)", visibility: "hidden" });
  chart.svg.append(cursor);
  chart.svg.addEventListener("pointermove", (event) => {
    const bounds = chart.svg.getBoundingClientRect();
    const at = ((event.clientX - bounds.left) / bounds.width) * chart.width;
    const nearest = (curve) => curve.points.reduce((best, point) =>
      Math.abs(chart.toX(point[0]) - at) < Math.abs(chart.toX(best[0]) - at) ? point : best);
    const [batch] = nearest(curves[0]);
    cursor.setAttribute("x1", chart.toX(batch));
    cursor.setAttribute("x2", chart.toX(batch));
    cursor.setAttribute("visibility", "visible");
    const values = curves.map((curve) => `${curve.name} ${figure(nearest(curve)[1])}`);
    tip.show(event, [`batch ${figure(Math.round(batch))}`, ...values].join("\n"));
  });
  chart.svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    tip.hide();
  });
  const keys = curves.map(({ name, color, isDashed, hasDots }) => key(name,
    element("line", { x1: 0, x2: 24, y1: 6, y2: 6, stroke: color, "stroke-width": 2, "stroke-dasharray": isDashed ? "6 4" : "none" }),
    ...(hasDots ? [element("circle", { cx: 12, cy: 6, r: 3.5, fill: color })] : [])));
  return element("div", {}, element("div", { class: "bar" }, ...keys), chart.svg);
}

const KIND_COLORS = [
  "#0072b2", "#56b4e9", "#9ecae1", "#004c6d", "#d55e00", "#f0a850", "#009e73", "#7fc8a9",
  "#cc79a7", "#e6b8d2", "#8c8c8c", "#f0e442",
];

/** Memory of stages: stacked bars, a mark where a peak was measured, a line for the limit. */
function memoryChart({ limit_bytes: limit, kinds, stages }) {
  const totals = stages.map(({ predicted }) => (predicted || []).reduce((sum, bytes) => sum + bytes, 0));
  const most = Math.max(...totals, ...stages.map(({ measured }) => measured || 0));
  const isLimitShown = limit !== null && limit <= 4 * most;
  const end = (isLimitShown ? Math.max(most, limit) : most) * 1.04;
  const unit = end >= 1e9 ? [1e9, "GB"] : [1e6, "MB"];
  const rowHeight = 30, height = stages.length * rowHeight + 52;
  const chart = axes({
    width: 1120, height, x: [0, end / unit[0]], y: [0, 0], xLabel: unit[1], yLabel: "", label: "memory by stage and kind",
  });
  chart.svg.querySelectorAll("line, text[text-anchor=end]").forEach((part) => part.remove());
  stages.forEach(({ predicted, measured }, stage) => {
    const top = chart.top + stage * rowHeight;
    chart.svg.append(element("text", { x: chart.left - 8, y: top + 16, "text-anchor": "end", class: "strong" }, `stage ${stage}`));
    let before = 0;
    (predicted || []).forEach((bytes, kind) => {
      const x = chart.toX(before / unit[0]), width = chart.toX((before + bytes) / unit[0]) - x;
      before += bytes;
      const part = element("rect", { x, y: top, width, height: 22, fill: KIND_COLORS[kind % KIND_COLORS.length], class: "memory" });
      tip.on(part, `stage ${stage}: ${kinds[kind].replace(/_/g, " ")} ${gigabytes(bytes)}\n${gigabytes(totals[stage])} in all`);
      chart.svg.append(part);
    });
    if (measured !== null) {
      const x = chart.toX(measured / unit[0]);
      const mark = element("path", { d: `M${x} ${top - 3}v28`, stroke: "var(--mark)", "stroke-width": 4, class: "measured" });
      tip.on(mark, `stage ${stage}: measured peak ${gigabytes(measured)}`);
      chart.svg.append(mark);
    }
  });
  if (isLimitShown) {
    const x = chart.toX(limit / unit[0]);
    chart.svg.append(element("line", { x1: x, x2: x, y1: chart.top - 6, y2: chart.bottom, stroke: "#d55e00", "stroke-width": 2, "stroke-dasharray": "5 4", class: "limit" }));
  }
  const line = (stroke, dash) => element("line", { x1: 12, x2: 12, y1: 0, y2: 12, stroke, "stroke-width": 3, "stroke-dasharray": dash });
  const keys = kinds.map((kind, n) => key(kind.replace(/_/g, " "), box(KIND_COLORS[n % KIND_COLORS.length])));
  if (stages.some(({ measured }) => measured !== null)) keys.push(key("measured peak", line("var(--mark)", "none")));
  if (isLimitShown) keys.push(key(`limit: ${gigabytes(limit)}`, line("#d55e00", "4 2")));
  const parts = [element("div", { class: "bar" }, ...keys), element("div", { class: "wide" }, chart.svg)];
  if (limit !== null && !isLimitShown) parts.push(element("p", {}, `The limit, ${gigabytes(limit)} a device, is far to the right of this.`));
  return element("div", {}, ...parts);
}

const SHAPES = [
  ["#0072b2", (x, y) => `M${x - 4} ${y}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0`],
  ["#d55e00", (x, y) => `M${x - 4} ${y - 4}h8v8h-8z`],
  ["#009e73", (x, y) => `M${x} ${y - 5}l5 9h-10z`],
  ["#cc79a7", (x, y) => `M${x} ${y - 5}l5 5l-5 5l-5 -5z`],
  ["#8c8c8c", (x, y) => `M${x - 4} ${y - 4}l8 8m0 -8l-8 8`],
];
const STAR = (x, y) => `M${x} ${y - 10}l2.9 6.2l6.6 .8l-4.9 4.6l1.3 6.6l-5.9 -3.3l-5.9 3.3l1.3 -6.6l-4.9 -4.6l6.6 -.8z`;

/** What a plan was chosen among: throughput over memory. */
function alternativesChart(content) {
  const { limit_bytes: limit, layout, schedule, samples_per_second: speeds, peak_bytes: peaks } = content;
  const end = Math.min(Math.max(...peaks), 2.5 * limit) * 1.03;
  const shown = layout.map((_, n) => n).filter((n) => peaks[n] <= end);
  const unit = end >= 1e9 ? [1e9, "GB"] : [1e6, "MB"];
  const chart = axes({
    width: 1120, height: 420, x: [0, end / unit[0]], y: [0, Math.max(...shown.map((n) => speeds[n])) * 1.08],
    xLabel: `memory of the fullest stage, ${unit[1]}`, yLabel: "samples a second", label: "throughput over memory",
  });
  const at = (n) => [chart.toX(peaks[n] / unit[0]), chart.toY(speeds[n])];
  if (limit <= end) {
    const x = chart.toX(limit / unit[0]);
    chart.svg.append(
      element("line", { x1: x, x2: x, y1: chart.top, y2: chart.bottom, stroke: "#d55e00", "stroke-width": 2, "stroke-dasharray": "5 4", class: "limit" }),
      element("text", { x: x + 5, y: chart.top + 12 }, `a device has ${gigabytes(limit)}`));
  }
  const steps = content.frontier.filter((n) => peaks[n] <= end).map((n, place) => {
    const [x, y] = at(n);
    return place ? `H${x.toFixed(1)}V${y.toFixed(1)}` : `M${x.toFixed(1)} ${y.toFixed(1)}`;
  });
  chart.svg.append(element("path", { d: steps.join(""), fill: "none", stroke: "var(--faint)", "stroke-width": 1.5, class: "frontier" }));
  const names = [...new Set(schedule)];
  for (const n of shown) {
    const [color, shape] = SHAPES[names.indexOf(schedule[n]) % SHAPES.length];
    const isChosen = n === layout.indexOf(content.chosen);
    const point = element("path", {
      d: (isChosen ? STAR : shape)(...at(n)), fill: color, stroke: isChosen || content.is_simulated[n] ? "var(--mark)" : color,
      opacity: peaks[n] <= limit ? 0.95 : 0.35, class: isChosen ? "chosen" : "alternative",
    });
    const how = content.is_simulated[n] ? "simulated" : "by closed form";
    tip.on(point, `${layout[n]}\n${figure(speeds[n])} samples/s ${how}, ${gigabytes(peaks[n])}${peaks[n] <= limit ? "" : ": does not fit"}${isChosen ? "\nthe plan" : ""}`);
    chart.svg.append(point);
  }
  const keys = names.map((name, n) => key(name, element("path", { d: SHAPES[n % SHAPES.length][1](12, 6), fill: SHAPES[n % SHAPES.length][0], stroke: SHAPES[n % SHAPES.length][0] })));
  keys.push(
    key("the plan", element("path", { d: STAR(20, 10), transform: "scale(.6)", fill: "none", stroke: "var(--mark)" })),
    key("none leaner is faster", element("line", { x1: 0, x2: 24, y1: 6, y2: 6, stroke: "var(--faint)", "stroke-width": 2 })),
    key("outlined: simulated", element("path", { d: SHAPES[0][1](12, 6), fill: "none", stroke: "var(--mark)" })));
  const left = layout.length - shown.length;
  const more = left ? [element("p", {}, `${left} more need over ${gigabytes(end)}.`)] : [];
  return element("div", {}, element("div", { class: "bar" }, ...keys), element("div", { class: "wide" }, chart.svg), ...more);
}
