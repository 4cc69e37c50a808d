"use strict";
// Builds the page from its content:
//   title   text
//   facts   [name, value], notes  text
//   timeline, memory, training, alternatives  as Python's *_section functions say; null if unknown

function section(title, ...parts) {
  return element("section", {}, element("h2", {}, title), ...parts);
}

function timelineSection(content, page) {
  const canvas = element("canvas", {
    id: "timeline",
    tabindex: 0,
    role: "img",
    "aria-label": "timeline of all ranks",
  });
  const button = (text, act) => {
    const made = element("button", { type: "button" }, text);
    made.addEventListener("click", act);
    return made;
  };
  const keys = [
    ["forward, even version", "forward-even"],
    ["odd", "forward-odd"],
    ["backward, even version", "backward-even"],
    ["odd", "backward-odd"],
    ["update", "update"],
    ["communication", "communication"],
    ["idle", "track"],
  ].map(([text, color]) => key(text, box(`var(--${color})`)));
  const about = element(
    "p",
    {},
    "F3@1 is the forward of microbatch 3 on weight version 1, B its backward, U3@2 the update " +
      "that makes version 2. Point at anything to read it. Drag to move; Ctrl and wheel, or + " +
      "and -, to zoom.",
  );
  const first = content.first_batch;
  const last = first + content.num_batches - 1;
  const buttons = element(
    "div",
    { class: "bar" },
    ...keys,
    button("+", () => page.timeline.zoom(ZOOM)),
    button("-", () => page.timeline.zoom(1 / ZOOM)),
    button("start", () => page.timeline.show(...page.timeline.first())),
    button("all", () => page.timeline.show(0, page.timeline.end)),
  );
  const names = content.panels.map(({ name }) => name).join(" above ");
  const title = `Timeline of batches ${first} to ${last}: ${names}`;
  return section(title, about, buttons, canvas, idleTable(content));
}

/** Where the time goes, rank by rank; with both panels, predicted / measured. */
function idleTable({ panels, reasons }) {
  const percent = (part) => `${(part * 100).toFixed(1)} %`;
  const shares = (row) => [1 - sum(row.idle), ...row.idle];
  const names = panels.map(({ name }) => name).join(" / ");
  const about = element("p", {}, "Shares of the time shown above, from its first to its last op.");
  const [measured, predicted] = [panels[panels.length - 1], panels[0]];
  const rows = measured.rows.map((row) => {
    const own = shares(row);
    const other =
      predicted === measured ? undefined : predicted.rows.find(({ stage }) => stage === row.stage);
    const cells = own.map((part, n) =>
      other ? `${percent(shares(other)[n])} / ${percent(part)}` : percent(part),
    );
    return [measured.name === "predicted" ? `stage ${row.stage}` : `rank ${row.rank}`, ...cells];
  });
  return element(
    "div",
    {},
    table([names, "busy", ...reasons.map((reason) => `idle: ${reason}`)], rows),
    about,
  );
}

function memorySection(content) {
  const { kinds, stages } = content;
  const [{ predicted: isPredicted, measured: isMeasured }] = stages;
  const head = ["stage", ...kinds.map(words)];
  if (isPredicted !== null) head.push("predicted");
  if (isMeasured !== null) head.push("measured");
  const rows = stages.map(({ predicted, measured }, stage) => {
    const cells = [String(stage)];
    if (predicted !== null) cells.push(...[...predicted, sum(predicted)].map(gigabytes));
    if (measured !== null) cells.push(gigabytes(measured));
    return cells;
  });
  return section("Memory by stage", memoryChart(content), table(head, rows));
}

function trainingSection(content) {
  const charts = [];
  const loss = [
    { name: "training loss", points: content.loss, color: "var(--forward-even)" },
    {
      name: "validation loss",
      points: content.validation_loss,
      color: "var(--backward-even)",
      hasDots: true,
    },
  ].filter(({ points }) => points.length);
  if (loss.length)
    charts.push(lineChart({ curves: loss, yLabel: content.loss_unit, label: "loss over batches" }));
  const speeds = content.tokens_per_second;
  const rate = content.predicted_tokens_per_second;
  const curves = [{ name: "measured", points: speeds, color: "var(--forward-even)" }];
  if (rate !== null) {
    const ends = [speeds[0][0], speeds[speeds.length - 1][0]];
    curves.push({
      name: "predicted",
      points: ends.map((batch) => [batch, rate]),
      color: "var(--backward-even)",
      isDashed: true,
    });
  }
  charts.push(
    lineChart({ curves, yLabel: "tokens a second", label: "throughput over batches", from: 0 }),
  );
  return section("Loss and throughput", element("div", { class: "charts" }, ...charts));
}

function build(content) {
  const main = document.getElementById("main");
  const page = {};
  const facts = content.facts.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value)),
  );
  main.append(element("dl", {}, ...facts));
  if (content.notes.length) {
    main.append(
      element("div", { class: "notes" }, ...content.notes.map((note) => element("p", {}, note))),
    );
  }
  if (content.timeline) main.append(timelineSection(content.timeline, page));
  if (content.memory) main.append(memorySection(content.memory));
  if (content.training) main.append(trainingSection(content.training));
  if (content.alternatives) {
    main.append(section("What the plan was chosen among", alternativesChart(content.alternatives)));
  }
  if (content.timeline)
    page.timeline = new Timeline(document.getElementById("timeline"), content.timeline);
  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const isDark = getComputedStyle(root).getPropertyValue("--page").trim() !== "#ffffff";
    root.dataset.theme = isDark ? "light" : "dark";
    if (page.timeline) page.timeline.draw();
  });
  return page;
}

window.twobwReport = build(JSON.parse(document.getElementById("content").textContent));
