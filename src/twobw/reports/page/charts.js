"use strict";
// Charts in SVG: axes, and curves over batches.

/** Axes of a chart: the SVG, its edges, and the maps from values to its coordinates. */
function axes({ width = 560, height = 250, x, y, xLabel, yLabel, label }) {
  const [left, right, top, bottom] = [72, width - 14, 12, height - 38];
  const toX = (value) => left + ((value - x[0]) / (x[1] - x[0] || 1)) * (right - left);
  const toY = (value) => bottom - ((value - y[0]) / (y[1] - y[0] || 1)) * (bottom - top);
  const viewBox = `0 0 ${width} ${height}`;
  const size = width > 1000 ? "chart broad" : "chart";
  const svg = element("svg", { class: size, viewBox, role: "img", "aria-label": label });
  const text = (words, at) => svg.append(element("text", at, words));
  for (const value of y[1] > y[0] ? ticks(...y, 5) : []) {
    svg.append(
      line(left, toY(value), right, toY(value), { stroke: "var(--line)", "stroke-width": 1 }),
    );
    text(figure(value), { x: left - 6, y: toY(value) + 4, "text-anchor": "end" });
  }
  for (const value of ticks(...x, 6)) {
    text(figure(value), { x: toX(value), y: bottom + 16, "text-anchor": "middle" });
  }
  text(xLabel, { x: (left + right) / 2, y: height - 4, "text-anchor": "middle" });
  const turned = { transform: "rotate(-90)", "text-anchor": "middle" };
  text(yLabel, { x: -(top + bottom) / 2, y: 12, ...turned });
  return { svg, toX, toY, left, top, bottom, width };
}

function line(x1, y1, x2, y2, style) {
  return element("line", { x1, y1, x2, y2, "stroke-width": 2, ...style });
}

/** A chart under its legend, with a word below where there is one to say. */
function withLegend(keys, svg, ...words) {
  const legend = element("div", { class: "bar" }, ...keys);
  const below = words.map((text) => element("p", {}, text));
  return element("div", {}, legend, element("div", { class: "wide" }, svg), ...below);
}

/** Curves over batches. Of each: name, points, color, and whether it isDashed or hasDots. */
function lineChart({ curves, yLabel, label, from }) {
  const points = curves.flatMap((curve) => curve.points);
  const xs = points.map(([batch]) => batch);
  const ys = points.map(([, value]) => value);
  const [low, high] = [from === undefined ? Math.min(...ys) : from, Math.max(...ys)];
  const x = [Math.min(...xs), Math.max(...xs)];
  const y = [low, high + ((high - low) * 0.05 || 1)];
  const chart = axes({ x, y, xLabel: "batch", yLabel, label });
  for (const curve of curves) chart.svg.append(...drawnCurve(chart, curve));
  readBatches(chart, curves);
  return withLegend(curves.map(curveKey), chart.svg);
}

function drawnCurve({ toX, toY }, { points, color, isDashed, hasDots }) {
  const places = points.map(([batch, value]) => [toX(batch).toFixed(1), toY(value).toFixed(1)]);
  const path = element("path", {
    d: `M${places.map((place) => place.join(" ")).join("L")}`,
    fill: "none",
    stroke: color,
    "stroke-width": 1.6,
    "stroke-dasharray": isDashed ? "6 4" : "none",
  });
  const dots = hasDots ? places : [];
  return [path, ...dots.map(([cx, cy]) => element("circle", { cx, cy, r: 3.5, fill: color }))];
}

function curveKey({ name, color, isDashed, hasDots }) {
  const dash = { stroke: color, "stroke-dasharray": isDashed ? "6 4" : "none" };
  const dots = hasDots ? [element("circle", { cx: 12, cy: 6, r: 3.5, fill: color })] : [];
  return key(name, line(0, 6, 24, 6, dash), ...dots);
}

/** Tell all curves' values at the batch that is pointed at. */
function readBatches(chart, curves) {
  const cursor = line(0, chart.top, 0, chart.bottom, { visibility: "hidden" });
  cursor.setAttribute("stroke", "var(--mark)");
  chart.svg.append(cursor);
  chart.svg.addEventListener("pointermove", (event) => {
    const { left, width } = chart.svg.getBoundingClientRect();
    const at = ((event.clientX - left) / width) * chart.width;
    const distance = ([batch]) => Math.abs(chart.toX(batch) - at);
    const nearest = ({ points }) =>
      points.reduce((best, point) => (distance(point) < distance(best) ? point : best));
    const [batch] = nearest(curves[0]);
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, chart.toX(batch));
    cursor.setAttribute("visibility", "visible");
    const values = curves.map((curve) => `${curve.name} ${figure(nearest(curve)[1])}`);
    tip.show(event, [`batch ${Math.round(batch)}`, ...values].join("\n"));
  });
  chart.svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    tip.hide();
  });
}
