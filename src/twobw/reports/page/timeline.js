"use strict";
// The timeline: panels of ranks on one axis of time, drawn on a canvas that zooms and pans.

// In pixels: the names at the left, the axis, a panel's head; of a row both lanes, and all of it.
const [LEFT, AXIS, HEAD] = [78, 22, 20];
const [COMPUTE, COMMUNICATION, ROW] = [20, 5, 31];
const ZOOM = 1.5;
const NAMES = {
  F: "forward",
  B: "backward",
  U: "update",
  R: "reduction",
  SA: "sends activation",
  RA: "receives activation",
  SG: "sends gradient",
  RG: "receives gradient",
};
const COLORS = (
  "forward-even forward-odd backward-even backward-odd update communication " +
  "text faint line track mark"
).split(" ");
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
    this.end = Math.max(
      ...content.panels.map(({ spans }) =>
        spans.start_ns.reduce((most, start, n) => Math.max(most, start + spans.duration_ns[n]), 0),
      ),
    );
    this.rows = [];
    let top = AXIS;
    for (const panel of content.panels) {
      panel.top = top;
      top += HEAD;
      panel.byOp = new Map(panel.spans.kind.map((_, n) => [this.identity(panel, n), n]));
      panel.rows.forEach((row, number) => {
        this.rows.push({
          ...row,
          panel,
          top,
          ranges: this.ranges(panel.spans, number),
          gaps: this.range(panel.gaps, number),
        });
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
    return [
      [from, middle],
      [middle, to],
    ];
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
    const fixed = this.toNs(x);
    const [from, to] = this.view;
    this.show(fixed - (fixed - from) / factor, fixed + (to - fixed) / factor);
  }

  pan(fraction) {
    const by = (this.view[1] - this.view[0]) * fraction;
    this.show(this.view[0] + by, this.view[1] + by);
  }

  draw() {
    const scale = Math.min(devicePixelRatio || 1, MOST_PIXELS / this.height);
    const style = getComputedStyle(document.documentElement);
    this.colors = {};
    for (const name of COLORS) this.colors[name] = style.getPropertyValue(`--${name}`).trim();
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
      context.fillStyle = this.colors.text;
      context.font = "bold 12px system-ui, sans-serif";
      context.fillText(panel.name, 0, panel.top + HEAD / 2);
    }
    context.font = "11px system-ui, sans-serif";
    this.rows.forEach((row) => this.drawRow(context, row));
    if (this.hovered) this.outline(context, this.hovered);
  }

  drawAxis(context) {
    const [from, to] = this.view;
    const [unit, name] = to - from < 1e5 ? [1e3, "µs"] : [1e6, "ms"];
    context.textAlign = "center";
    for (const value of ticks(from / unit, to / unit, (this.width - LEFT) / 120)) {
      const x = this.toX(value * unit);
      context.fillStyle = this.colors.line;
      context.fillRect(x, AXIS - 4, 1, this.height - AXIS);
      context.fillStyle = this.colors.faint;
      context.fillText(
        `${figure(value)} ${name}`,
        Math.min(Math.max(x, LEFT + 20), this.width - 24),
        8,
      );
    }
    context.textAlign = "left";
  }

  drawRow(context, row) {
    context.fillStyle = this.colors.faint;
    context.fillText(this.nameOf(row), 0, row.top + COMPUTE / 2);
    context.save();
    context.beginPath();
    context.rect(LEFT, row.top, this.width - LEFT, ROW);
    context.clip();
    context.fillStyle = this.colors.track;
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

  /** Spans of one lane; of compute spans that share a pixel the first. */
  drawSpans(context, { panel }, [from, to], top, height, isCompute) {
    const { start_ns: starts, duration_ns: durations } = panel.spans;
    const first = isCompute ? Math.max(lowerBound(starts, this.view[0], from, to) - 1, from) : from;
    let last = -Infinity;
    for (let n = first; n < to; n++) {
      if (isCompute && starts[n] > this.view[1]) break;
      const left = Math.max(this.toX(starts[n]), LEFT - 2);
      const right = this.toX(starts[n] + durations[n]);
      if (right < LEFT || left > this.width || (isCompute && right - last < 0.4)) continue;
      last = right;
      const width = Math.max(right - left, 0.5);
      context.fillStyle = this.colorOf(panel.spans, n);
      context.fillRect(left, top, width > 3 ? width - 1 : width, height);
      this.numDrawn++;
      if (isCompute) this.label(context, panel, n, left, width, top + height / 2);
    }
  }

  colorOf(spans, n) {
    const kind = this.content.kinds[spans.kind[n]];
    const parity = spans.version[n] % 2 ? "odd" : "even";
    if (kind === "F") return this.colors[`forward-${parity}`];
    if (kind === "B") return this.colors[`backward-${parity}`];
    return kind === "U" ? this.colors.update : this.colors.communication;
  }

  /** The whole text of an op, or its version, or nothing: what there is room for. */
  label(context, panel, n, left, width, middle) {
    if (width < 12) return;
    const version = panel.spans.version[n];
    const fits = (text) => context.measureText(text).width < width - 5;
    const text = [this.text(panel, n), `@${version}`].find(fits);
    if (text === undefined) return;
    const isLight = version % 2 && this.content.kinds[panel.spans.kind[n]] !== "U";
    context.fillStyle = isLight ? "#10151c" : "#ffffff";
    context.fillText(text, left + 3, middle);
  }

  text({ spans }, n) {
    return `${this.content.kinds[spans.kind[n]]}${spans.microbatch[n]}@${spans.version[n]}`;
  }

  outline(context, { row, start, end, isCompute }) {
    const left = Math.max(this.toX(start), LEFT);
    const width = Math.max(this.toX(end) - left, 1);
    const [top, height] = isCompute ? [row.top, COMPUTE] : [row.top + COMPUTE + 1, COMMUNICATION];
    context.strokeStyle = this.colors.mark;
    context.lineWidth = 1.5;
    context.strokeRect(left, top, width, height);
  }

  /** The span or gap at a place of the canvas, with what is to be said of it. */
  at(x, y) {
    const row = this.rows.find(({ top }) => y >= top && y < top + ROW);
    if (!row || x < LEFT) return null;
    const isCompute = y < row.top + COMPUTE;
    const ns = this.toNs(x);
    const { spans, gaps } = row.panel;
    const [from, to] = row.ranges[isCompute ? 0 : 1];
    for (let n = from; n < to; n++) {
      const [start, end] = [spans.start_ns[n], spans.start_ns[n] + spans.duration_ns[n]];
      if (start <= ns && ns <= end)
        return { row, start, end, isCompute, text: this.describe(row, n) };
    }
    for (const n of isCompute ? row.gaps : []) {
      const [start, end] = [gaps.start_ns[n], gaps.end_ns[n]];
      if (start <= ns && ns <= end)
        return { row, start, end, isCompute, text: this.explain(row, n) };
    }
    return null;
  }

  describe(row, n) {
    const { panel } = row;
    const { kind, microbatch, batch, version } = panel.spans;
    const lines = [
      `${this.text(panel, n)}: ${NAMES[this.content.kinds[kind[n]]]}, microbatch ${microbatch[n]}`,
      `batch ${batch[n]}, weight version ${version[n]}; ${this.nameOf(row)}`,
      this.time(panel, n),
    ];
    for (const other of this.content.panels) {
      const same = other === panel ? undefined : other.byOp.get(this.identity(panel, n));
      if (same !== undefined) lines.push(this.time(other, same));
    }
    return lines.join("\n");
  }

  time({ name, spans }, n) {
    const [start, duration] = [spans.start_ns[n], spans.duration_ns[n]].map(milliseconds);
    return `${name} ${duration}, from ${start}`;
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
    const before = this.hovered;
    this.hovered = this.at(event.clientX - left, event.clientY - top);
    if (this.hovered) tip.show(event, this.hovered.text);
    else tip.hide();
    if ((before && before.text) !== (this.hovered && this.hovered.text)) this.draw();
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
    canvas.addEventListener(
      "wheel",
      (event) => {
        if (event.ctrlKey || event.metaKey) {
          this.zoom(1.002 ** -event.deltaY, event.clientX - canvas.getBoundingClientRect().left);
        } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
          this.pan((event.deltaX || event.deltaY) / this.width);
        } else return;
        event.preventDefault();
      },
      { passive: false },
    );
    const keys = {
      "+": () => this.zoom(ZOOM),
      "=": () => this.zoom(ZOOM),
      "-": () => this.zoom(1 / ZOOM),
      ArrowLeft: () => this.pan(-0.2),
      ArrowRight: () => this.pan(0.2),
      0: () => this.show(0, this.end),
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
