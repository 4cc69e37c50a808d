"use strict";
// The timeline: panels of ranks on one axis of time, drawn on a canvas that zooms and pans.

const LEFT = 78, AXIS = 22, HEAD = 20, COMPUTE = 20, COMMUNICATION = 5, ROW = 31;
const ZOOM = 1.5;
const MOST_PIXELS = 16000; // that every browser's canvas may be high

/** The first place of an ascending list, from `from` to `to`, whose value is at least `value`. */
function lowerBound(list, value, from, to) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (list[middle] < value) from = middle + 1;
    else to = middle;
  }
  return from;
}

class Timeline {
  constructor(canvas, content) {
    this.canvas = canvas;
    this.content = content;
    this.end = Math.max(...content.panels.map(({ spans }) => spans.start_ns.reduce(
      (most, start, n) => Math.max(most, start + spans.duration_ns[n]), 0)));
    this.rows = [];
    let top = AXIS;
    for (const panel of content.panels) {
      panel.top = top;
      top += HEAD;
      panel.byOp = new Map(panel.spans.kind.map((_, n) => [this.identity(panel, n), n]));
      panel.rows.forEach((row, number) => {
        this.rows.push({ ...row, panel, top, ranges: this.ranges(panel.spans, number), gaps: this.range(panel.gaps, number) });
        top += ROW;
      });
    }
    this.height = top + 4;
    this.view = this.first();
    this.listen();
    this.draw();
  }

  /** What an op is in both panels; of replicas the first one counts. */
  identity({ rows, spans }, n) {
    return `${spans.kind[n]} ${rows[spans.row[n]].stage} ${spans.microbatch[n]}`;
  }

  /** Places of a row's gaps. Lists are ordered by row or, of gaps, by start. */
  range(gaps, row) {
    return gaps.row.map((_, n) => n).filter((n) => gaps.row[n] === row);
  }

  /** From and to of a row's compute spans, and of its others. */
  ranges(spans, row) {
    const from = lowerBound(spans.row, row, 0, spans.row.length);
    const to = lowerBound(spans.row, row + 1, from, spans.row.length);
    let middle = from;
    while (middle < to && spans.is_compute[middle]) middle++;
    return [[from, middle], [middle, to]];
  }

  /** Four batches, so that single ops can be seen. */
  first() {
    return [0, Math.max(this.end / Math.max(this.content.num_batches / 4, 1), 1)];
  }

  toX(ns) {
    return LEFT + ((ns - this.view[0]) / (this.view[1] - this.view[0])) * (this.width - LEFT);
  }

  toNs(x) {
    return this.view[0] + ((x - LEFT) / (this.width - LEFT)) * (this.view[1] - this.view[0]);
  }

  /** Show this time, within the whole. */
  show(from, to) {
    const length = Math.min(Math.max(to - from, 1000), this.end);
    const start = Math.min(Math.max(from, 0), this.end - length);
    this.view = [start, start + length];
    this.draw();
  }

  zoom(factor, x = (LEFT + this.width) / 2) {
    const fixed = this.toNs(x), [from, to] = this.view;
    this.show(fixed - (fixed - from) / factor, fixed + (to - fixed) / factor);
  }

  pan(fraction) {
    const by = (this.view[1] - this.view[0]) * fraction;
    this.show(this.view[0] + by, this.view[1] + by);
  }

  draw() {
    const scale = Math.min(devicePixelRatio || 1, MOST_PIXELS / this.height), style = getComputedStyle(document.documentElement);
    this.color = (name) => style.getPropertyValue(`--${name}`).trim();
    this.width = this.canvas.clientWidth || 900;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = Math.round(this.width * scale);
    this.canvas.height = Math.round(this.height * scale);
    const context = (this.context = this.canvas.getContext("2d"));
    context.scale(scale, scale);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    this.numDrawn = 0;
    this.drawAxis(context);
    for (const panel of this.content.panels) {
      context.fillStyle = this.color("text");
      context.font = "bold 12px system-ui, sans-serif";
      context.fillText(panel.name, 0, panel.top + HEAD / 2);
    }
    context.font = "11px system-ui, sans-serif";
    this.rows.forEach((row) => this.drawRow(context, row));
    if (this.hovered) this.outline(context, this.hovered);
  }

  drawAxis(context) {
    const unit = this.view[1] - this.view[0] < 1e5 ? [1e3, "µs"] : [1e6, "ms"];
    context.textAlign = "center";
    for (const value of ticks(this.view[0] / unit[0], this.view[1] / unit[0], (this.width - LEFT) / 120)) {
      const x = this.toX(value * unit[0]);
      context.fillStyle = this.color("line");
      context.fillRect(x, AXIS - 4, 1, this.height - AXIS);
      context.fillStyle = this.color("faint");
      context.fillText(`${figure(value)} ${unit[1]}`, Math.min(Math.max(x, LEFT + 20), this.width - 24), 8);
    }
    context.textAlign = "left";
  }

  drawRow(context, row) {
    context.fillStyle = this.color("faint");
    context.fillText(this.nameOf(row), 0, row.top + COMPUTE / 2);
    context.save();
    context.beginPath();
    context.rect(LEFT, row.top, this.width - LEFT, ROW);
    context.clip();
    context.fillStyle = this.color("track");
    context.fillRect(LEFT, row.top, this.width - LEFT, COMPUTE);
    const [compute, others] = row.ranges;
    this.drawSpans(context, row, others, row.top + COMPUTE + 1, COMMUNICATION, false);
    this.drawSpans(context, row, compute, row.top, COMPUTE, true);
    context.restore();
  }

  /** What is predicted is alike for all replicas of a stage. */
  nameOf({ rank, stage, panel }) {
    if (panel.name === "predicted") return `stage ${stage}`;
    return rank === stage ? `rank ${rank}` : `${rank} (stage ${stage})`;
  }

  /** Spans of one lane; of several that share a pixel the first. */
  drawSpans(context, { panel }, [from, to], top, height, isCompute) {
    const { start_ns: starts, duration_ns: durations } = panel.spans;
    let last = -Infinity;
    for (let n = isCompute ? Math.max(lowerBound(starts, this.view[0], from, to) - 1, from) : from; n < to; n++) {
      if (starts[n] > this.view[1]) { if (isCompute) break; else continue; }
      const left = Math.max(this.toX(starts[n]), LEFT - 2), right = this.toX(starts[n] + durations[n]);
      if (right < LEFT || (isCompute && right - last < 0.4)) continue;
      last = right;
      const width = Math.max(right - left, 0.5);
      context.fillStyle = this.colorOf(panel.spans, n);
      context.fillRect(left, top, width > 3 ? width - 1 : width, height);
      this.numDrawn++;
      if (isCompute) this.label(context, panel, n, left, width, top + height / 2);
    }
  }

  colorOf(spans, n) {
    const kind = this.content.kinds[spans.kind[n]], parity = spans.version[n] % 2 ? "odd" : "even";
    if (kind === "F") return this.color(`forward-${parity}`);
    if (kind === "B") return this.color(`backward-${parity}`);
    return this.color(kind === "U" ? "update" : "communication");
  }

  /** The whole text of an op, or its version, or nothing: what there is room for. */
  label(context, panel, n, left, width, middle) {
    const version = `@${panel.spans.version[n]}`;
    const text = [this.text(panel, n), version].find((words) => context.measureText(words).width < width - 5);
    if (text === undefined) return;
    context.fillStyle = panel.spans.version[n] % 2 && this.content.kinds[panel.spans.kind[n]] !== "U" ? "#10151c" : "#ffffff";
    context.fillText(text, left + 3, middle);
  }

  text({ spans }, n) {
    return `${this.content.kinds[spans.kind[n]]}${spans.microbatch[n]}@${spans.version[n]}`;
  }

  outline(context, { row, start, end, isCompute }) {
    const left = Math.max(this.toX(start), LEFT);
    context.strokeStyle = this.color("mark");
    context.lineWidth = 1.5;
    context.strokeRect(left, row.top + (isCompute ? 0 : COMPUTE + 1), Math.max(this.toX(end) - left, 1), isCompute ? COMPUTE : COMMUNICATION);
  }

  /** The span or gap at a place of the canvas, with what is to be said of it. */
  at(x, y) {
    const row = this.rows.find(({ top }) => y >= top && y < top + ROW);
    if (!row || x < LEFT) return null;
    const isCompute = y < row.top + COMPUTE, ns = this.toNs(x), { spans } = row.panel;
    const [from, to] = row.ranges[isCompute ? 0 : 1];
    for (let n = from; n < to; n++) {
      const start = spans.start_ns[n], end = start + spans.duration_ns[n];
      if (start <= ns && ns <= end) return { row, start, end, isCompute, text: this.describe(row, n) };
    }
    const { gaps } = row.panel;
    const gap = isCompute && row.gaps.find((n) => gaps.start_ns[n] <= ns && ns <= gaps.end_ns[n]);
    if (gap === false || gap === undefined) return null;
    return { row, start: gaps.start_ns[gap], end: gaps.end_ns[gap], isCompute, text: this.explain(row, gap) };
  }

  describe(row, n) {
    const { panel, panel: { spans } } = row;
    const names = { F: "forward", B: "backward", U: "update", R: "reduction", SA: "sends activation", RA: "receives activation", SG: "sends gradient", RG: "receives gradient" };
    const lines = [
      `${this.text(panel, n)}: ${names[this.content.kinds[spans.kind[n]]]}, microbatch ${spans.microbatch[n]}`,
      `batch ${spans.batch[n]}, weight version ${spans.version[n]}; ${this.nameOf(row)}`,
      `${panel.name} ${milliseconds(spans.duration_ns[n])}, from ${milliseconds(spans.start_ns[n])}`,
    ];
    for (const other of this.content.panels) {
      const same = other === panel ? undefined : other.byOp.get(this.identity(panel, n));
      if (same !== undefined) {
        lines.push(`${other.name} ${milliseconds(other.spans.duration_ns[same])}, from ${milliseconds(other.spans.start_ns[same])}`);
      }
    }
    return lines.join("\n");
  }

  explain(row, n) {
    const { name, gaps } = row.panel;
    const lines = [
      `idle: ${this.content.reasons[gaps.reason[n]]}`,
      `${name} ${milliseconds(gaps.end_ns[n] - gaps.start_ns[n])} on ${this.nameOf(row)}`,
    ];
    if (gaps.waits_for[n] !== null) lines.push(`waits for ${gaps.waits_for[n]}`);
    lines.push(`would help: ${this.content.help[gaps.reason[n]]}`);
    return lines.join("\n");
  }

  hover(event) {
    const { left, top } = this.canvas.getBoundingClientRect();
    this.hovered = this.at(event.clientX - left, event.clientY - top);
    if (this.hovered) tip.show(event, this.hovered.text);
    else tip.hide();
    this.draw();
  }

  listen() {
    const { canvas } = this;
    let dragged = 0;
    canvas.addEventListener("pointerdown", (event) => {
      dragged = event.clientX;
      this.hovered = null;
      tip.hide();
    });
    canvas.addEventListener("pointermove", (event) => {
      if (event.buttons !== 1) return this.hover(event);
      this.pan((dragged - event.clientX) / (this.width - LEFT));
      dragged = event.clientX;
    });
    canvas.addEventListener("pointerleave", () => {
      this.hovered = null;
      tip.hide();
      this.draw();
    });
    canvas.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) {
        this.zoom(1.002 ** -event.deltaY, event.clientX - canvas.getBoundingClientRect().left);
      } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        this.pan((event.deltaX || event.deltaY) / this.width);
      } else return;
      event.preventDefault();
    }, { passive: false });
    const keys = {
      "+": () => this.zoom(ZOOM), "=": () => this.zoom(ZOOM), "-": () => this.zoom(1 / ZOOM),
      ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), 0: () => this.show(0, this.end),
    };
    canvas.addEventListener("keydown", (event) => {
      if (!(event.key in keys) || event.ctrlKey || event.metaKey) return;
      keys[event.key]();
      event.preventDefault();
    });
    addEventListener("resize", () => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }
}
