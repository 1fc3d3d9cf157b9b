"use strict";
// What all views share: the data, elements, units, colours. Text enters the page as text only, never as markup.

const DATA = JSON.parse(document.getElementById("data").textContent);

/** An element with attributes, listeners (on...) and children; strings become text. */
function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "rect", "text", "path", "line", "g"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style" && typeof value === "object") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** A table of the profile as objects. */
function rows(table) {
  return table.rows.map((row) => Object.fromEntries(table.columns.map((name, i) => [name, row[i]])));
}

const units = {
  time(ns, digits = 3) {
    if (ns === null || ns === undefined || Number.isNaN(ns)) return "–";
    for (const [size, unit] of [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]]) if (Math.abs(ns) >= size) return `${Number((ns / size).toPrecision(digits))} ${unit}`;
    return `${Math.round(ns)} ns`;
  },
  bytes(count) {
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (Math.abs(count) < 1024 || unit === "GiB") return `${three(count)} ${unit}`;
      count /= 1024;
    }
  },
  count(value) {
    for (const [size, unit] of [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"]]) if (value >= size) return three(value / size) + unit;
    return String(Math.round(value));
  },
  share: (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)}%`),
  rate: (value) => (value === null ? "–" : value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 2 : 0 })),
};

/** The phases that the stages of a profile have. */
function phasesOf(profile) {
  const own = new Set(rows(profile.tasks).map((task) => task.phase));
  return Object.keys(PHASES).filter((phase) => own.has(phase));
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);

function three(value) {
  return Number(value.toPrecision(3)).toString();
}

// A phase has one colour in all views, and in the drawings of the documentation (popengine/drawing.py).
const PHASE_COLOURS = { F: "#1565c0", B: "#b8510d", W: "#2e7d32" }, UPDATE = "#4d5a68";
const OTHER = "#8794a3";
const PHASES = { F: "forward", B: "backward", W: "weight gradients" };
const MEMORY = [
  ["weights", "#0072b2"], ["buffers", "#56b4e9"], ["gradients", "#e69f00"], ["optimizer", "#009e73"],
  ["activations", "#cc79a7"], ["between", "#d55e00"],
];

/** A function of strings and numbers that computes each result once: a picture asks 100,000 times a frame. */
function remembered(compute) {
  const known = new Map();
  return (...given) => {
    const key = given.join();
    if (!known.has(key)) known.set(key, compute(...given));
    return known.get(key);
  };
}

/** A phase's colour; a later one of several stages in the same row is lighter. */
const phaseColour = (phase, shade = 0) => (PHASE_COLOURS[phase] ? mixed(PHASE_COLOURS[phase], "#ffffff", 0.17 * (shade % 4)) : OTHER);

const mixed = remembered((colour, other, share) => {
  const channel = (text, i) => parseInt(text.slice(1 + 2 * i, 3 + 2 * i), 16);
  const parts = [0, 1, 2].map((i) => Math.round(channel(colour, i) * (1 - share) + channel(other, i) * share));
  return `#${parts.map((part) => part.toString(16).padStart(2, "0")).join("")}`;
});

/** WCAG's relative luminance of "#rrggbb". */
const luminance = remembered((colour) => {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16) / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
});

function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

/** Black or white, whichever is read better on the colour: at 0.179 both contrasts of WCAG are equal, and over 4.5. */
const inkOn = (colour) => (luminance(colour) > 0.179 ? "#000000" : "#ffffff");

/** The colour, as far towards black or white as it needs to stand out from a ground. WCAG asks for a contrast of 3; the ground may be shaded by a range. */
const firm = remembered((colour, ground) => {
  const far = inkOn(ground);
  for (let share = 0; share < 1; share += 0.05) if (contrast(mixed(colour, far, share), ground) >= 3.8) return mixed(colour, far, share);
  return far;
});

/** A bar on a ground: its fill, the outline that makes it stand out, the ink on it, and the colour of one without place for an outline. */
const barOn = remembered((fill, ground) => ({ fill, edge: firm(mixed(fill, inkOn(ground), 0.5), ground), ink: inkOn(fill), firm: firm(fill, ground) }));

/** A line that is seen on whatever it crosses: it has a seam of the card's colour. */
function seamed(context, card, colour, width, path) {
  for (const [style, wide] of [[card, width + 3], [colour, width]]) {
    context.strokeStyle = style; context.lineWidth = wide;
    context.beginPath(); path(); context.stroke();
  }
  context.lineWidth = 1;
}

/** Whether a text has all words of a query. A word that ends in a digit is a whole number: "stage1" isn't "stage12". */
function matcher(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean).map((word) => new RegExp(word.replace(/[^\w\s]/g, "\\$&") + (/\d$/.test(word) ? "(?!\\d)" : "")));
  return (text) => words.every((word) => word.test(text));
}

function themed(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** A canvas in device pixels; `draw(context, width, height)` in CSS pixels, at most once a frame. */
function sharpCanvas(height, draw, attributes = {}) {
  const canvas = make("canvas", { tabindex: "0", ...attributes });
  canvas.style.height = `${height}px`;
  let asked = false;
  canvas.redraw = () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; canvas.drawNow(); });
  };
  canvas.drawNow = () => {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, tall = canvas.clientHeight;
    if (!width) return;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(tall * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(tall * ratio);
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, tall);
    draw(context, width, tall);
  };
  new ResizeObserver(canvas.redraw).observe(canvas);
  return canvas;
}

const tip = {
  element: document.getElementById("tip"),
  show(x, y, lines) {
    const [first, ...others] = lines;
    this.element.replaceChildren(make("strong", {}, first), ...others.map((line) => make("div", {}, line)));
    this.element.hidden = false;
    const box = this.element.getBoundingClientRect();
    this.element.style.left = `${Math.max(4, Math.min(x + 14, window.innerWidth - box.width - 8))}px`;
    this.element.style.top = `${y + 18 + box.height > window.innerHeight ? Math.max(4, y - box.height - 12) : y + 18}px`;
  },
  hide() { this.element.hidden = true; },
};

/** Buttons of which one is pressed. */
function choice(label, names, chosen, choose) {
  const buttons = names.map((name, i) => make("button", {
    type: "button", "aria-pressed": String(i === chosen), onclick: () => {
      buttons.forEach((button, j) => button.setAttribute("aria-pressed", String(i === j)));
      choose(i);
    },
  }, name));
  return make("div", { class: "choice", role: "group", "aria-label": label }, buttons);
}

function legend(entries) {
  return make("div", { class: "legend" }, entries.map(([name, colour]) => make("span", { title: MEANINGS[name] }, make("i", { style: { background: colour } }), name)));
}

/** How many of the first items have a property; after the first one without it no other has it. */
function countWhile(size, has) {
  let low = 0, high = size;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (has(middle)) low = middle + 1; else high = middle;
  }
  return low;
}

/** Round steps for an axis over `span`, about `count` of them. */
function niceStep(span, count) {
  const rough = span / count, power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 5, 10].find((step) => step * power >= rough) || 10);
}
