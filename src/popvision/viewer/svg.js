// A picture of a trace as SVG: what a canvas is told, written as elements.

class SvgContext {
  constructor(width, height, ground) {
    Object.assign(this, { width, height, elements: [], saved: [], clips: 0, globalAlpha: 1, path: [], ruler: document.createElement("canvas").getContext("2d") });
    this.fillStyle = ground;
    this.fillRect(0, 0, width, height);
  }

  element(name, attributes, text = null) {
    const element = make(name, Object.fromEntries(Object.entries(attributes).map(([key, value]) => [key, typeof value === "number" ? Number(value.toFixed(2)) : value])));
    if (text !== null) element.textContent = text;
    this.elements.push(element.outerHTML);
  }

  fillRect(x, y, width, height) { this.element("rect", { x, y, width, height, fill: this.fillStyle, opacity: this.globalAlpha < 1 ? this.globalAlpha : null }); }
  fillText(text, x, y, textLength) { this.element("text", { x, y, textLength, lengthAdjust: textLength && "spacingAndGlyphs", fill: this.fillStyle, "dominant-baseline": "central" }, text); }
  measureText(text) { this.ruler.font = this.font; return this.ruler.measureText(text); }
  createPattern() { return "url(#hatch)"; }

  beginPath() { this.path = []; }
  moveTo(x, y) { this.path.push(`M${x.toFixed(2)} ${y.toFixed(2)}`); }
  lineTo(x, y) { this.path.push(`L${x.toFixed(2)} ${y.toFixed(2)}`); }
  rect(x, y, width, height) { this.path.push(`M${x} ${y}h${width}v${height}h${-width}z`); }
  stroke() { this.element("path", { d: this.path.join(""), fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth || 1 }); }

  save() { this.saved.push(0); }
  clip() {
    const id = `clip${this.clips++}`;
    this.elements.push(`<clipPath id="${id}"><path d="${this.path.join("")}"/></clipPath><g clip-path="url(#${id})">`);
    this.saved[this.saved.length - 1] += 1;
  }
  restore() { this.elements.push("</g>".repeat(this.saved.pop())); }

  toString() {
    const hatch = `<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="${UPDATE}"/><path d="M-1 7L7 -1" stroke="#c3ccd6" stroke-width="1.2"/></pattern>`;
    return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${this.width} ${this.height}" width="${this.width}" height="${this.height}" font-family="system-ui, 'DejaVu Sans', sans-serif" font-size="11.5"><defs>${hatch}</defs>${this.elements.join("")}</svg>\n`;
  }
}

/** What a trace shows, as SVG: the same window of time, and all rows. */
function traceSvg(entry, trace) {
  const picture = new TracePicture(entry, { compact: true, on: trace.on });
  Object.assign(picture, { view: trace.view, until: trace.until, gap: trace.gap });
  const width = 1000, context = new SvgContext(width, picture.top + picture.lanes.length * picture.rowHeight, themed("--card"));
  picture.draw(context, width);
  return String(context);
}
