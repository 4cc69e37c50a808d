"use strict";
// Charts of a plan: memory by stage and kind, and what it was chosen among.

const LIMIT = { stroke: "#d55e00", "stroke-dasharray": "5 4" };
const BAR = 22;
const BAR_ROW = 30;
const KIND_COLORS = (
  "#0072b2 #56b4e9 #9ecae1 #004c6d #d55e00 #f0a850 " +
  "#009e73 #7fc8a9 #cc79a7 #e6b8d2 #8c8c8c #f0e442"
).split(" ");
const SCHEDULE_MARKS = [
  ["#0072b2", (x, y) => `M${x - 4} ${y}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0`],
  ["#d55e00", (x, y) => `M${x - 4} ${y - 4}h8v8h-8z`],
  ["#009e73", (x, y) => `M${x} ${y - 5}l5 9h-10z`],
  ["#cc79a7", (x, y) => `M${x} ${y - 5}l5 5l-5 5l-5 -5z`],
  ["#8c8c8c", (x, y) => `M${x - 4} ${y - 4}l8 8m0 -8l-8 8`],
];
const STAR = (x, y) =>
  `M${x} ${y - 10}l2.9 6.2l6.6 .8l-4.9 4.6l1.3 6.6l-5.9 -3.3l-5.9 3.3l1.3 -6.6l-4.9 -4.6l6.6 -.8z`;

function unitFor(bytes) {
  return bytes >= 1e9 ? [1e9, "GB"] : [1e6, "MB"];
}

/** Memory of stages: stacked bars, a mark where a peak was measured, a line for the limit. */
function memoryChart({ limit_bytes: limit, kinds, stages }) {
  const most = Math.max(
    ...stages.map(({ predicted, measured }) => Math.max(sum(predicted || []), measured || 0)),
  );
  const isLimitShown = limit !== null && limit <= 4 * most;
  const end = (isLimitShown ? Math.max(most, limit) : most) * 1.04;
  const [unit, xLabel] = unitFor(end);
  const chart = axes({
    width: 1120,
    height: stages.length * BAR_ROW + 52,
    x: [0, end / unit],
    y: [0, 0],
    xLabel,
    yLabel: "",
    label: "memory by stage and kind",
  });
  const toX = (bytes) => chart.toX(bytes / unit);
  const keys = kinds.map((kind, n) => key(words(kind), box(KIND_COLORS[n % KIND_COLORS.length])));
  stages.forEach(({ predicted, measured }, stage) => {
    const top = chart.top + stage * BAR_ROW;
    const at = { x: chart.left - 8, y: top + 16, "text-anchor": "end", class: "strong" };
    chart.svg.append(element("text", at, `stage ${stage}`));
    if (predicted !== null) chart.svg.append(...memoryBar(stage, kinds, predicted, toX, top));
    if (measured !== null) chart.svg.append(measuredMark(stage, measured, toX, top));
  });
  if (stages[0].measured !== null) {
    keys.push(key("measured peak", line(12, 0, 12, 12, { stroke: "var(--mark)" })));
  }
  if (!isLimitShown) {
    const far = `The limit, ${gigabytes(limit || 0)} a device, is far to the right of this.`;
    return withLegend(keys, chart.svg, ...(limit === null ? [] : [far]));
  }
  chart.svg.append(
    line(toX(limit), chart.top - 6, toX(limit), chart.bottom, { ...LIMIT, class: "limit" }),
  );
  keys.push(key(`limit: ${gigabytes(limit)}`, line(12, 0, 12, 12, LIMIT)));
  return withLegend(keys, chart.svg);
}

function memoryBar(stage, kinds, predicted, toX, y) {
  return predicted.map((bytes, kind) => {
    const before = sum(predicted.slice(0, kind));
    const x = toX(before);
    const part = element("rect", {
      x,
      y,
      width: toX(before + bytes) - x,
      height: BAR,
      class: "memory",
      fill: KIND_COLORS[kind % KIND_COLORS.length],
    });
    const whole = `${gigabytes(sum(predicted))} in all`;
    tip.on(part, `stage ${stage}: ${words(kinds[kind])} ${gigabytes(bytes)}\n${whole}`);
    return part;
  });
}

function measuredMark(stage, bytes, toX, top) {
  const place = [toX(bytes), top - 3, toX(bytes), top + BAR + 3];
  const mark = line(...place, { stroke: "var(--mark)", "stroke-width": 4, class: "measured" });
  tip.on(mark, `stage ${stage}: measured peak ${gigabytes(bytes)}`);
  return mark;
}

/** What a plan was chosen among: throughput over memory. */
function alternativesChart(content) {
  const { limit_bytes: limit, schedule, samples_per_second: speeds, peak_bytes: peaks } = content;
  const end = Math.min(Math.max(...peaks), 2.5 * limit) * 1.03;
  const shown = peaks.map((_, n) => n).filter((n) => peaks[n] <= end);
  const [unit, name] = unitFor(end);
  const chart = axes({
    width: 1120,
    height: 420,
    x: [0, end / unit],
    y: [0, Math.max(...shown.map((n) => speeds[n])) * 1.08],
    xLabel: `memory of the fullest stage, ${name}`,
    yLabel: "samples a second",
    label: "throughput over memory",
  });
  const place = (n) => [chart.toX(peaks[n] / unit), chart.toY(speeds[n])];
  if (limit <= end) {
    const x = chart.toX(limit / unit);
    const text = `a device has ${gigabytes(limit)}`;
    chart.svg.append(
      line(x, chart.top, x, chart.bottom, { ...LIMIT, class: "limit" }),
      element("text", { x: x + 5, y: chart.top + 12 }, text),
    );
  }
  chart.svg.append(frontierLine(content.frontier.filter((n) => peaks[n] <= end).map(place)));
  const schedules = [...new Set(schedule)];
  for (const n of shown.reverse()) {
    // The first ones are the best, and so on top.
    const mark = SCHEDULE_MARKS[schedules.indexOf(schedule[n]) % SCHEDULE_MARKS.length];
    chart.svg.append(alternativeMark(content, n, mark, place(n)));
  }
  const left = peaks.length - shown.length;
  const more = left ? [`${left} more need over ${gigabytes(end)}.`] : [];
  return withLegend(alternativeKeys(schedules), chart.svg, ...more);
}

function frontierLine(places) {
  const steps = places.map(([x, y], n) => (n ? `H${x}V${y}` : `M${x} ${y}`));
  return element("path", {
    d: steps.join(""),
    fill: "none",
    stroke: "var(--faint)",
    class: "frontier",
  });
}

function alternativeMark(content, n, [color, shape], place) {
  const { layout, limit_bytes: limit, samples_per_second: speeds, peak_bytes: peaks } = content;
  const [isChosen, isSimulated] = [n === layout.indexOf(content.chosen), content.is_simulated[n]];
  const mark = element("path", {
    d: (isChosen ? STAR : shape)(...place),
    fill: color,
    stroke: isSimulated ? "var(--mark)" : color,
    opacity: peaks[n] <= limit ? 0.95 : 0.35,
    class: isChosen ? "chosen" : "alternative",
  });
  const lines = [
    layout[n],
    `${figure(speeds[n])} samples/s ${isSimulated ? "simulated" : "by closed form"}`,
    `${gigabytes(peaks[n])}${peaks[n] <= limit ? "" : ": does not fit"}`,
  ];
  tip.on(mark, [...lines, ...(isChosen ? ["the plan"] : [])].join("\n"));
  return mark;
}

function alternativeKeys(schedules) {
  const outlined = { fill: "none", stroke: "var(--mark)" };
  const keys = schedules.map((name, n) => {
    const [color, shape] = SCHEDULE_MARKS[n % SCHEDULE_MARKS.length];
    return key(name, element("path", { d: shape(12, 6), fill: color, stroke: color }));
  });
  const star = { d: STAR(20, 10), transform: "scale(.6)", ...outlined };
  return [
    ...keys,
    key("the plan", element("path", star)),
    key("none leaner is faster", line(0, 6, 24, 6, { stroke: "var(--faint)" })),
    key("outlined: simulated", element("path", { d: SCHEDULE_MARKS[0][1](12, 6), ...outlined })),
  ];
}
