// Contrasts of what the page shows, computed as WCAG says and not by the page's own code. Colours: [r, g, b], "rgb(...)" or "#rrggbb".

const linear = (c) => (c /= 255) <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
const numbers = (colour) => typeof colour !== 'string' ? [...colour] : colour.startsWith('#')
  ? [1, 3, 5, 7].slice(0, (colour.length - 1) / 2).map((i, n) => parseInt(colour.slice(i, i + 2), 16) / (n == 3 ? 255 : 1))
  : (colour.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
const over = (top, below) => {
  const [r, g, b, a = 1] = numbers(top);
  return [r, g, b].map((c, i) => a * c + (1 - a) * numbers(below)[i]);
};
const light = (colour) => {
  const [r, g, b] = numbers(colour).map(linear);
  return .2126 * r + .7152 * g + .0722 * b;
};
const between = (one, other) => {
  const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
  return (high + .05) / (low + .05);
};
const own = (name) => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();
const behind = (element) => {
  for (; element; element = element.parentElement) {
    const colour = getComputedStyle(element).backgroundColor;
    if ((numbers(colour)[3] ?? 1) > 0) return colour;
  }
  return 'rgb(255, 255, 255)';
};
const pixels = (canvas, x, y, wide = 1, tall = 1) => {
  const data = canvas.getContext('2d').getImageData(x, y, wide, tall).data, found = [];
  for (let i = 0; i < data.length; i += 4) found.push(over([data[i], data[i + 1], data[i + 2], data[i + 3] / 255], own('card')));
  return found;
};

/** Texts whose contrast with what is behind them is too little, with that contrast. */
function pale() {
  const found = [];
  for (const element of document.querySelectorAll('body *')) {
    const text = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!text || !element.getClientRects().length) continue;
    const style = getComputedStyle(element), svg = element.namespaceURI.endsWith('svg');
    const contrast = between(over(svg ? style.fill : style.color, behind(element)), behind(element));
    if (contrast < 4.5) found.push([element.textContent.slice(0, 40), contrast]);
  }
  return found;
}

/** Outlines of bars, dots and boxes, and lines of the diagram, that can't be told from what is behind them. */
function faint() {
  const found = [];
  for (const element of document.querySelectorAll('.bar i, .legend i, td .dot')) {
    const style = getComputedStyle(element), edge = style.boxShadow.match(/rgba?\([^)]*\)/)[0];
    if (numbers(style.backgroundColor)[3] === 0 && style.backgroundImage === 'none') continue; // waiting: empty
    const contrast = between(over(edge, style.backgroundColor), behind(element.parentElement));
    if (contrast < 3) found.push([element.outerHTML, contrast]);
  }
  for (const element of document.querySelectorAll('.diagram [stroke]')) {
    const contrast = between(over(getComputedStyle(element).stroke, behind(element)), behind(element));
    if (contrast < 3) found.push([element.outerHTML, contrast]);
  }
  for (const element of document.querySelectorAll('input, select, button.plain')) {
    if (!element.getClientRects().length || element.type === 'checkbox') continue;
    const contrast = between(getComputedStyle(element).borderTopColor, behind(element.parentElement));
    if (contrast < 3) found.push([element.outerHTML, contrast]);
  }
  return found;
}

/** Texts in pictures, each against every pixel that it is written on; and how many there were. */
function written() {
  const plain = CanvasRenderingContext2D.prototype.fillText, found = [];
  let count = 0;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    const wide = Math.ceil(this.measureText(text).width);
    const left = Math.max(0, Math.floor(x)), grounds = pixels(this.canvas, left, Math.round(y) - 5, Math.min(wide, this.canvas.width - left) || 1, 10);
    const least = Math.min(...grounds.map((ground) => between(this.fillStyle, ground)));
    count += 1;
    if (least < 4.5) found.push([text, least]);
    plain.call(this, text, x, y);
  };
  for (const canvas of document.querySelectorAll('canvas')) canvas.drawNow();
  CanvasRenderingContext2D.prototype.fillText = plain;
  return [count, found];
}

/** Of all events and actions in sight the pixel where each begins, against the empty lane; and how wide they are. */
function bars() {
  const trace = popvision.trace || popvision.miniature, canvas = trace.canvas, width = canvas.clientWidth, tall = trace.rowHeight - 12, found = [], widths = new Set();
  canvas.drawNow();
  trace.lanes.forEach((lane, number) => {
    const top = trace.top + number * trace.rowHeight, starts = [], covered = new Set();
    let last = -1;
    for (let i = 0; i < lane.size; i++) {
      if (trace.parts[lane.part[i]].kind === 'receive' || lane.end[i] <= trace.view[0]) continue;
      const x = Math.round(trace.x(lane.start[i], width)), end = Math.max(x + 1, Math.round(trace.x(lane.end[i], width)));
      for (let column = Math.max(x, 0); column < Math.min(end, width); column++) covered.add(column);
      if (x >= trace.left && x < width - 1 && end !== last) { starts.push(x); widths.add(Math.min(end - x, 9)); }
      last = end;
    }
    let empty = width - 1;
    while (covered.has(empty)) empty--;
    if (empty < trace.left) return;
    const row = pixels(canvas, 0, top + tall - 3, width), ground = row[empty], card = pixels(canvas, trace.left - 10, top)[0];
    for (const x of starts) if (between(row[x], ground) < 3) found.push(['event', number, x, row[x], ground]);
    if (trace.range) return;
    const strip = pixels(canvas, 0, top + tall + 2, width);
    for (const x of strip.keys()) if (x >= trace.left && between(strip[x], card) > 1.05 && between(strip[x], card) < 3) found.push(['strip', number, x, strip[x], card]);
    const lines = pixels(canvas, 0, top + tall + 10, width).filter((pixel) => between(pixel, card) > 1.05);
    if ((!lines.length || lines.some((pixel) => between(pixel, card) < 3))) found.push(['grid', number, lines]);
  });
  return [found, [...widths].sort()];
}

/** Along a line of pixels the lightest and the darkest: a line and its seam, whatever they cross. */
function crossed() {
  const trace = popvision.trace, canvas = trace.canvas, width = canvas.clientWidth, found = {};
  canvas.drawNow();
  const most = (x, y, wide, tall) => {
    const all = pixels(canvas, Math.round(x), Math.round(y), wide, tall).sort((a, b) => light(a) - light(b));
    return between(all[0], all[all.length - 1]);
  };
  const middle = (lane) => trace.top + trace.lanes.indexOf(lane) * trace.rowHeight + (trace.rowHeight - 12) / 2;
  found.arrows = trace.transfers().flatMap(([from, i, to, j]) => [0.2, 0.4, 0.6, 0.8].flatMap((share) => {
    const x = trace.x(from.end[i], width), u = trace.x(to.end[j], width), y = middle(from), v = middle(to);
    const at = x + share * (u - x);
    return at < trace.left + 4 || at > width - 4 ? [] : [most(at - 3, y + share * (v - y) - 3, 7, 7)];
  }));
  const [lane, i] = trace.chosen;
  found.chosen = [most(trace.x(lane.start[i], width) - 4, middle(lane), 8, 1), most(trace.x(lane.end[i], width) - 4, middle(lane), 8, 1)];
  found.range = trace.range.flatMap((time) => trace.lanes.map((lane) => most(trace.x(time, width) - 4, middle(lane), 8, 1)));
  const strip = document.querySelector('main canvas'), share = strip.clientWidth / (trace.all[1] - trace.all[0]);
  const place = (time) => Math.round((time - trace.all[0]) * share);
  const empty = own('lane');
  found.overview = [...trace.calls.map((call) => [call, 8]), ...trace.steps.map((step) => [step, 17])].flatMap(([{ start, end }, y]) =>
    trace.view.some((time) => Math.abs(place(time) - place((start + end) / 2)) < 4) ? [] : [between(pixels(strip, place((start + end) / 2), y)[0], empty)]);
  return found;
}

function stroked() {
  const used = new Set(), target = CanvasRenderingContext2D.prototype, { stroke, fillRect } = target;
  target.stroke = function () { used.add(this.strokeStyle); stroke.call(this); };
  target.fillRect = function (...box) { used.add(this.fillStyle); fillRect.apply(this, box); };
  for (const canvas of document.querySelectorAll('canvas')) canvas.drawNow();
  Object.assign(target, { stroke, fillRect });
  return [...used].map((colour) => [colour, between(colour, own('card'))]);
}

/** Texts that the window, their element or their picture cuts, where nothing scrolls them into sight. */
function cut() {
  const found = [], plain = CanvasRenderingContext2D.prototype.fillText;
  for (const element of document.querySelectorAll('body *')) {
    const text = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!text || !element.getClientRects().length || element.closest('.scroll, .alive, #tabs, #tip')) continue;
    const { left, right } = element.getBoundingClientRect();
    const hidden = getComputedStyle(element).overflowX === 'hidden' && element.scrollWidth > element.clientWidth;
    if (left < 0 || right > innerWidth || hidden) found.push(element.textContent);
  }
  for (const text of document.querySelectorAll('.diagram text')) {
    const { x, y, width, height } = text.getBBox(), [, , wide, tall] = text.closest('svg').getAttribute('viewBox').split(' ');
    if (x < 0 || y < 0 || x + width > wide || y + height > tall) found.push(text.textContent);
  }
  CanvasRenderingContext2D.prototype.fillText = function (text, x) {
    if (x < 0 || x + this.measureText(text).width > this.canvas.clientWidth) found.push(text);
  };
  for (const canvas of document.querySelectorAll('canvas')) canvas.drawNow();
  CanvasRenderingContext2D.prototype.fillText = plain;
  return found;
}
