"use strict";
// Text reaches the page only as text nodes: nothing that a tenant names is read as HTML.

// Controls, bidirectional overrides and what has no width are spelled out, as in a terminal.
const HIDDEN = /[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
const plain = (text) => String(text).replace(HIDDEN, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);

const byId = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, plain(value));
  }
  node.append(...children.flat().filter((child) => child != null).map((child) => (child instanceof Node ? child : plain(child))));
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

function setText(node, text) {
  const shown = plain(text);
  if (node.textContent !== shown) node.textContent = shown;
}

const sum = (values) => values.reduce((a, b) => a + b, 0);

const NONE = "–";
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const count = (value) => (value == null ? NONE : whole.format(value));
const percent = (value) => (value == null ? NONE : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)}%`);
function decimal(value, digits = 2) {
  if (value == null) return NONE;
  return Math.abs(value) >= 100 ? whole.format(value) : String(Number(value.toFixed(digits)));
}
function seconds(value) {
  if (value == null) return NONE;
  if (value === 0) return "0 ms";
  if (value >= 1) return `${value.toFixed(2)} s`;
  if (value >= 0.001) return `${(1000 * value).toFixed(value < 0.1 ? 1 : 0)} ms`;
  return `${(1e6 * value).toFixed(0)} µs`;
}
function bytes(value) {
  if (value == null) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; value >= 1024 && at < units.length - 1; at += 1) value /= 1024;
  return `${value < 10 && at ? value.toFixed(1) : Math.round(value)} ${units[at]}`;
}
const clock = (unix) => new Date(1000 * unix).toLocaleTimeString("en-GB");

function meter(share, label) {
  const part = share == null ? 0 : Math.max(0, Math.min(1, share));
  const bar = el("span");
  bar.style.width = `${100 * part}%`;
  const kind = part >= 0.95 ? "meter full" : "meter";
  return el("span", { class: kind, role: "img", "aria-label": `${label}: ${percent(share)}` }, bar);
}
