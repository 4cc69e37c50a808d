"use strict";
// Elements, the tooltip, numbers, tables, legends. Texts are set as text, never as markup.

function element(name, attributes = {}, ...children) {
  const isSvg = element.svg.has(name);
  const made = isSvg
    ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
element.svg = new Set(["svg", "rect", "line", "path", "circle", "text"]);

const tip = {
  show(event, text) {
    const box = document.getElementById("tip");
    box.textContent = text;
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const beside = (at, size, end) => Math.max(at + 14 + size > end ? at - 14 - size : at + 14, 0);
    box.style.left = `${beside(event.clientX, width, innerWidth)}px`;
    box.style.top = `${beside(event.clientY, height, innerHeight)}px`;
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

function words(name) {
  return name.replace(/_/g, " ");
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

/** Up to four digits, with thousands apart. */
function figure(value) {
  return value.toLocaleString("en", { maximumSignificantDigits: 4 });
}

function gigabytes(bytes) {
  return bytes >= 1e9 ? `${(bytes / 1e9).toFixed(2)} GB` : `${(bytes / 1e6).toFixed(2)} MB`;
}

function milliseconds(ns) {
  return `${figure(ns / 1e6)} ms`;
}

function table(head, rows) {
  const cells = (name, row) => element("tr", {}, ...row.map((text) => element(name, {}, text)));
  const body = element("tbody", {}, ...rows.map((row) => cells("td", row)));
  return element(
    "div",
    { class: "wide" },
    element("table", {}, element("thead", {}, cells("th", head)), body),
  );
}

/** A key of a legend: a text after SVG elements in a box of 24 by 12. */
function key(text, ...drawn) {
  return element(
    "span",
    { class: "key" },
    element("svg", { viewBox: "0 0 24 12", "aria-hidden": "true" }, ...drawn),
    text,
  );
}

function box(fill) {
  return element("rect", { width: 24, height: 12, rx: 2, fill });
}
