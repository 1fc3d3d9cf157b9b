// The execution trace: a row an ipu, the schedule's order under it, the host above, one clock for all.

const WORDS = { compute: "compute", receive: "wait for", send: "send", load: "load input", accumulate: "add to gradient sums", keep: "keep buffers", store: "return output", update: "update weights", free: "free" };

/** Tracks joined with the program: for each replica and ipu, arrays in order of time. */
function lanesOf(profile) {
  const parts = rows(profile.parts), found = new Map();
  for (const track of rows(profile.tracks)) {
    const key = `${track.replica}.${track.ipu}`;
    if (!found.has(key)) found.set(key, { replica: track.replica, ipu: track.ipu, tracks: [] });
    found.get(key).tracks.push(track);
  }
  const lanes = [...found.values()].sort((a, b) => a.replica - b.replica || a.ipu - b.ipu);
  for (const lane of lanes) {
    lane.tracks.sort((a, b) => a.start - b.start);
    const size = lane.tracks.reduce((sum, track) => sum + track.durations.length, 0), program = profile.programs[lane.ipu];
    Object.assign(lane, { start: new Float64Array(size), end: new Float64Array(size), part: new Int32Array(size), batch: new Int32Array(size), track: new Int32Array(size), size: 0 });
    lane.tracks.forEach((track, number) => {
      let at = track.start;
      track.durations.forEach((duration, index) => {
        const i = lane.size;
        if (parts[program[2 * index]].kind !== "free") {
          lane.start[i] = at; lane.end[i] = at + duration; lane.part[i] = program[2 * index];
          lane.batch[i] = program[2 * index + 1]; lane.track[i] = number; lane.size += 1;
        }
        at += duration;
      });
    });
  }
  return { lanes, parts };
}

/** Windows of the steps: from the first computation to the end of the last instruction that isn't waiting. */
function stepsOf({ lanes, parts }) {
  const found = new Map();
  for (const lane of lanes) {
    for (let i = 0; i < lane.size; i++) {
      const part = parts[lane.part[i]];
      if (part.kind === "receive") continue;
      const track = lane.tracks[lane.track[i]], key = `${track.call}.${track.step}`;
      const step = found.get(key) || { call: track.call, step: track.step, start: Infinity, end: -Infinity };
      if (part.kind === "compute") step.start = Math.min(step.start, lane.start[i]);
      step.end = Math.max(step.end, lane.end[i]);
      found.set(key, step);
    }
  }
  return [...found.values()].filter((step) => step.start < step.end).sort((a, b) => a.start - b.start);
}

class Trace {
  constructor(entry, { compact = false, goTo = null } = {}) {
    this.profile = entry.profile;
    this.compact = compact;
    this.goTo = goTo;
    Object.assign(this, lanesOf(this.profile));
    this.steps = stepsOf(this);
    this.ticks = rows(this.profile.schedule);
    this.calls = rows(this.profile.calls);
    this.host = rows(this.profile.host);
    this.blocks = rows(this.profile.blocks);
    this.pieces = rows(this.profile.pieces);
    this.hatches = new Map();
    const starts = this.lanes.filter((lane) => lane.size).map((lane) => lane.start[0]);
    const ends = this.lanes.filter((lane) => lane.size).map((lane) => lane.end[lane.size - 1]);
    this.all = [Math.min(...starts, ...this.calls.map((call) => call.start)), Math.max(...ends, ...this.calls.map((call) => call.end))];
    this.chosen = null; // [lane, index]: what the keyboard or a click has chosen
    this.rowHeight = compact ? 26 : Math.max(26, Math.min(46, 560 / Math.max(1, this.lanes.length)));
    this.top = compact ? 22 : 62;
    const height = this.top + this.lanes.length * this.rowHeight + 8;
    this.canvas = sharpCanvas(height, (context, width) => this.draw(context, width), {
      class: compact ? "" : "pan", role: "img",
      "aria-label": "Execution trace. Arrows pan, plus and minus zoom, comma and full stop step through events, Enter lists an event's operations",
    });
    this.view = this.oneStep();
    this.listen();
  }

  /** The window of a step in the middle of the run: the first ones are not typical. */
  oneStep() {
    const step = this.steps[Math.min(2, this.steps.length - 1)];
    if (!step) return [...this.all];
    const margin = (step.end - step.start) * 0.02;
    return [step.start - margin, step.end + margin];
  }

  oneCall() {
    const step = this.steps[Math.min(2, this.steps.length - 1)];
    const call = step && this.calls.find((entry) => entry.call === step.call);
    return call ? [call.start, call.end] : [...this.all];
  }

  show(view) {
    const [low, high] = this.all, most = (high - low) * 1.1 || 1, span = Math.min(most, Math.max(50, view[1] - view[0]));
    let start = (view[0] + view[1] - span) / 2;
    start = Math.max(low - 0.05 * most, Math.min(start, high + 0.05 * most - span));
    this.view = [start, start + span];
    this.canvas.redraw();
    if (this.follower) this.follower(this.view);
  }

  zoom(factor, at = (this.view[0] + this.view[1]) / 2) {
    this.show([at - (at - this.view[0]) * factor, at + (this.view[1] - at) * factor]);
  }

  pan(share) {
    const shift = share * (this.view[1] - this.view[0]);
    this.show([this.view[0] + shift, this.view[1] + shift]);
  }

  get left() { return this.compact ? 58 : 84; }
  x(time, width) { return this.left + ((time - this.view[0]) / (this.view[1] - this.view[0])) * (width - this.left); }
  time(x, width) { return this.view[0] + ((x - this.left) / (width - this.left)) * (this.view[1] - this.view[0]); }

  // ---- drawing

  draw(context, width) {
    const colours = { ink: themed("--ink"), soft: themed("--soft"), line: themed("--line"), lane: themed("--lane") };
    context.font = '11.5px system-ui, "DejaVu Sans", sans-serif';
    context.textBaseline = "middle";
    this.drawAxis(context, width, colours);
    context.save();
    context.beginPath();
    context.rect(this.left, 0, width - this.left, 4000);
    context.clip();
    if (!this.compact) this.drawHost(context, width, colours);
    this.drawn = 0;
    this.lanes.forEach((lane, i) => this.drawLane(context, width, lane, this.top + i * this.rowHeight, colours));
    if (this.mark) this.drawMark(context, width, colours);
    context.restore();
    context.fillStyle = colours.ink;
    this.lanes.forEach((lane, i) => {
      const name = this.lanes.some((other) => other.replica) ? `${lane.replica} · ipu ${lane.ipu}` : `ipu ${lane.ipu}`;
      context.fillText(name, 4, this.top + i * this.rowHeight + (this.rowHeight - 10) / 2);
    });
  }

  drawAxis(context, width, colours) {
    const step = niceStep(this.view[1] - this.view[0], Math.max(2, (width - this.left) / 130));
    const origin = this.steps.length ? this.steps[0].start : this.all[0];
    context.strokeStyle = colours.line;
    context.fillStyle = colours.soft;
    for (let time = origin + Math.ceil((this.view[0] - origin) / step) * step; time < this.view[1]; time += step) {
      const x = Math.round(this.x(time, width)) + 0.5;
      context.beginPath(); context.moveTo(x, 16); context.lineTo(x, 4000); context.stroke();
      const label = Math.abs(time - origin) < step / 2 ? "0" : units.time(Math.round(time - origin));
      context.fillText(label, x + 3, 9);
    }
  }

  drawHost(context, width, colours) {
    const y = 22, bar = (start, end, colour, name, top, tall) => {
      const x = this.x(start, width), wide = Math.max(1, this.x(end, width) - x);
      if (x > width || x + wide < this.left) return;
      context.fillStyle = colour;
      context.fillRect(x, top, wide, tall);
      const at = Math.max(x, this.left);
      if (x + wide - at > 60) { context.fillStyle = inkOn(colour); context.fillText(name, at + 5, top + tall / 2 + 0.5); }
    };
    context.fillStyle = colours.lane;
    context.fillRect(this.left, y, width, 16);
    this.calls.forEach((call) => bar(call.start, call.end, "#8794a3", `call ${call.call}`, y, 16));
    this.host.forEach((event) => bar(event.start, event.end, event.kind === "loader" ? "#d55e00" : "#56b4e9", event.kind, y + 18, 12));
    context.restore();
    context.fillStyle = colours.ink;
    context.fillText("host", 4, y + 8);
    context.save();
    context.beginPath(); context.rect(this.left, 0, width - this.left, 4000); context.clip();
  }

  drawLane(context, width, lane, top, colours) {
    const tall = this.rowHeight - 12, ideal = top + tall + 2;
    context.fillStyle = colours.lane;
    context.fillRect(this.left, top, width, tall);
    let i = firstEndingAfter(lane, this.view[0]), painted = -1;
    for (; i < lane.size && lane.start[i] < this.view[1]; i++) {
      const part = this.parts[lane.part[i]];
      if (part.kind === "receive") continue;
      const x = this.x(lane.start[i], width), end = this.x(lane.end[i], width);
      if (Math.floor(end) === painted && end - x < 0.5) continue; // that pixel has its colour already
      painted = Math.floor(end);
      this.drawn += 1;
      this.drawEvent(context, part, lane.batch[i], x, Math.max(0.6, end - x), top, tall);
    }
    if (this.chosen && this.chosen[0] === lane) {
      const x = this.x(lane.start[this.chosen[1]], width), end = this.x(lane.end[this.chosen[1]], width);
      context.strokeStyle = colours.ink; context.lineWidth = 2;
      context.strokeRect(x, top - 1, Math.max(2, end - x), tall + 2);
      context.lineWidth = 1;
    }
    this.drawIdeal(context, width, lane, ideal);
  }

  drawEvent(context, part, batch, x, wide, top, tall) {
    if (part.kind === "compute") {
      const colour = stageColour(part.stage, part.phase);
      context.fillStyle = colour;
      context.fillRect(x, top, wide, tall);
      if (wide > 3) { context.fillStyle = "#ffffff55"; context.fillRect(x, top, 0.7, tall); }
      const label = String(batch);
      if (wide > 7 + 7 * label.length) {
        context.fillStyle = inkOn(colour);
        context.fillText(wide > 40 ? `${part.phase}${label}` : label, x + 4, top + tall / 2 + 0.5);
      }
    } else if (part.kind === "update") {
      context.fillStyle = wide > 4 ? this.hatch(context) : OTHER;
      context.fillRect(x, top, wide, tall);
    } else { // what surrounds a computation is half as high
      context.fillStyle = mixed(stageColour(part.stage), "#8794a3", 0.55);
      context.fillRect(x, top + tall / 2, wide, tall / 2);
    }
  }

  hatch(context) {
    if (!this.hatches.has("update")) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = 6;
      const paint = tile.getContext("2d");
      paint.fillStyle = "#4d5a68"; paint.fillRect(0, 0, 6, 6);
      paint.strokeStyle = "#c3ccd6"; paint.lineWidth = 1.2;
      paint.beginPath(); paint.moveTo(-1, 7); paint.lineTo(7, -1); paint.stroke();
      this.hatches.set("update", context.createPattern(tile, "repeat"));
    }
    return this.hatches.get("update");
  }

  /** The order of the schedule, stretched over the step that was measured. */
  drawIdeal(context, width, lane, top) {
    const length = this.profile.facts.schedule_length;
    if (!length) return;
    const own = this.ticks.filter((tick) => tick.ipu === lane.ipu);
    for (const step of this.steps) {
      if (step.end < this.view[0] || step.start > this.view[1]) continue;
      const unit = (step.end - step.start) / length;
      if ((unit * (width - this.left)) / (this.view[1] - this.view[0]) < 0.7) continue;
      for (const tick of own) {
        const x = this.x(step.start + tick.tick * unit, width), end = this.x(step.start + (tick.tick + 1) * unit, width);
        if (end < this.left || x > width) continue;
        context.fillStyle = stageColour(tick.stage, tick.phase);
        context.fillRect(x, top, Math.max(0.5, end - x - 0.6), 5);
      }
    }
  }

  /** A time of the other run, in a comparison. */
  drawMark(context, width, colours) {
    const x = this.x(this.mark.time, width), bottom = this.top + this.lanes.length * this.rowHeight;
    context.strokeStyle = colours.ink; context.fillStyle = colours.ink;
    context.setLineDash([5, 4]);
    context.beginPath(); context.moveTo(x, this.top - 18); context.lineTo(x, bottom); context.stroke();
    context.setLineDash([]);
    context.textAlign = x > width / 2 ? "right" : "left";
    context.fillText(this.mark.text, x + (x > width / 2 ? -6 : 6), this.top - 10);
    context.textAlign = "left";
  }

  // ---- asking

  /** The event at a point, as [lane, index], or the host's, or nothing. */
  at(x, y, width) {
    const lane = this.lanes[Math.floor((y - this.top) / this.rowHeight)];
    if (!lane || x < this.left) return null;
    const time = this.time(x, width), slack = 2 * (this.view[1] - this.view[0]) / width;
    const i = firstEndingAfter(lane, time - slack);
    return i < lane.size && lane.start[i] <= time + slack ? [lane, i] : null;
  }

  words([lane, i]) {
    const part = this.parts[lane.part[i]], batch = lane.batch[i], track = lane.tracks[lane.track[i]];
    const piece = this.pieces.find((entry) => entry.phase === part.phase && entry.stage === part.stage);
    const phase = { F: "Forward", B: "Backward" }[part.phase];
    const lines = [part.kind === "compute" ? `${phase} of stage ${part.stage}, micro-batch ${batch}` : `${WORDS[part.kind]}${part.peer >= 0 ? ` ipu ${part.peer}` : ""}${batch >= 0 ? `, micro-batch ${batch}` : ""}`];
    if (part.stage >= 0) lines.push(`blocks ${this.profile.stages[part.stage]}`);
    if (piece && part.kind === "compute") lines.push(piece.where);
    lines.push(`${units.time(lane.end[i] - lane.start[i])} on ipu ${lane.ipu}, replica ${lane.replica}`);
    if (part.bytes) lines.push(units.bytes(part.bytes));
    lines.push(`step ${track.step}, call ${track.call}`);
    return lines;
  }

  choose(place, { follow = true } = {}) {
    this.chosen = place;
    if (place && follow) {
      const [lane, i] = place, span = this.view[1] - this.view[0];
      if (lane.start[i] < this.view[0] || lane.end[i] > this.view[1]) this.show([lane.start[i] - span / 4, lane.start[i] + (3 * span) / 4]);
      const box = this.canvas.getBoundingClientRect(), x = Math.max(this.left, this.x(lane.start[i], box.width));
      tip.show(box.left + x, box.top + this.top + this.lanes.indexOf(lane) * this.rowHeight, this.words(place));
    }
    this.canvas.redraw();
  }

  listen() {
    const canvas = this.canvas;
    let dragged = null;
    const position = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top, box.width]; };
    canvas.addEventListener("pointermove", (event) => {
      const [x, y, width] = position(event);
      if (dragged) {
        const shift = ((dragged.x - x) / (width - this.left)) * (dragged.view[1] - dragged.view[0]);
        dragged.moved = dragged.moved || Math.abs(dragged.x - x) > 3;
        this.show([dragged.view[0] + shift, dragged.view[1] + shift]);
        return;
      }
      const place = this.at(x, y, width);
      if (place) tip.show(event.clientX, event.clientY, this.words(place)); else tip.hide();
    });
    canvas.addEventListener("pointerleave", () => tip.hide());
    canvas.addEventListener("blur", () => tip.hide());
    if (this.compact) return;
    canvas.addEventListener("pointerdown", (event) => {
      const [x] = position(event);
      dragged = { x, view: [...this.view], moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", (event) => {
      const [x, y, width] = position(event);
      if (dragged && !dragged.moved) this.choose(this.at(x, y, width), { follow: false });
      dragged = null;
    });
    canvas.addEventListener("dblclick", () => this.openOperations());
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const [x, , width] = position(event);
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / width);
      else this.zoom(Math.exp(event.deltaY * 0.0016), this.time(x, width));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const actions = {
      ArrowLeft: () => this.pan(-0.15), ArrowRight: () => this.pan(0.15), "+": () => this.zoom(0.7), "=": () => this.zoom(0.7), "-": () => this.zoom(1 / 0.7),
      Home: () => this.show(this.oneStep()), 0: () => this.show([...this.all]), ".": () => this.next(1), ",": () => this.next(-1),
      ArrowDown: () => this.lane(1), ArrowUp: () => this.lane(-1), Enter: () => this.openOperations(), Escape: () => { tip.hide(); this.choose(null); },
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[event.key]();
  }

  next(step) {
    if (!this.chosen) { this.lane(0); return; }
    const [lane, i] = this.chosen;
    let j = i + step;
    while (j >= 0 && j < lane.size && this.parts[lane.part[j]].kind !== "compute") j += step;
    if (j >= 0 && j < lane.size) this.choose([lane, j]);
  }

  lane(step) {
    const number = this.chosen ? this.lanes.indexOf(this.chosen[0]) + step : 0, lane = this.lanes[number];
    if (!lane || !lane.size) return;
    let i = firstEndingAfter(lane, this.chosen ? this.chosen[0].start[this.chosen[1]] : this.view[0]);
    while (i < lane.size - 1 && this.parts[lane.part[i]].kind !== "compute") i += 1;
    this.choose([lane, Math.min(i, lane.size - 1)]);
  }

  openOperations() {
    if (!this.chosen || !this.goTo) return;
    const part = this.parts[this.chosen[0].part[this.chosen[1]]];
    if (part.stage >= 0) this.goTo("operations", { stage: part.stage, phase: part.phase });
  }

  /** Choose the first computation of a piece in a typical step. */
  find(phase, stage) {
    const begin = this.oneStep()[0];
    for (const lane of this.lanes) {
      for (let i = firstEndingAfter(lane, begin); i < lane.size; i++) {
        const part = this.parts[lane.part[i]];
        if (part.kind === "compute" && part.phase === phase && part.stage === stage) {
          const span = (lane.end[i] - lane.start[i]) * 6;
          this.show([lane.start[i] - span / 3, lane.start[i] + (2 * span) / 3]);
          this.choose([lane, i], { follow: false });
          return true;
        }
      }
    }
    return false;
  }

  legend() {
    const entries = this.profile.stages.flatMap((blocks, stage) => this.profile.training
      ? [[`stage ${stage} forward: ${blocks}`, stageColour(stage)], [`backward`, stageColour(stage, "B")]]
      : [[`stage ${stage}: ${blocks}`, stageColour(stage)]]);
    return legend([...entries.slice(0, 32), ["weight update (hatched)", "repeating-linear-gradient(135deg,#4d5a68 0 3px,#c3ccd6 3px 4px)"], ["copies and sums (half as high)", OTHER], ["empty: waiting", "var(--lane)"]]);
  }
}

/** Index of the first event that ends after a time: events of a lane follow one another. */
function firstEndingAfter(lane, time) {
  let low = 0, high = lane.size;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.end[middle] <= time) low = middle + 1; else high = middle;
  }
  return low;
}

function traceView(entry, page) {
  const trace = new Trace(entry, { goTo: page.goTo });
  page.trace = trace;
  if (!trace.lanes.length) return emptyCard("Nothing was recorded", "The model was compiled, but no call of it ended while profiling was on.");
  const button = (name, action) => make("button", { type: "button", class: "plain", onclick: action }, name);
  const steps = make("select", { class: "plain", "aria-label": "Step", onchange: () => {
    const step = trace.steps[Number(steps.value)], margin = (step.end - step.start) * 0.02;
    trace.show([step.start - margin, step.end + margin]);
  } }, trace.steps.slice(0, 2000).map((step, i) => make("option", { value: i, selected: i === Math.min(2, trace.steps.length - 1) }, `step ${step.step} of call ${step.call}`)));
  const map = overview(trace);
  return make("div", {},
    make("section", { class: "card" },
      make("div", { class: "tools" }, make("h2", { style: { margin: "0" } }, "Who ran what, and when"), make("span", { class: "spring" }),
        steps, button("One step", () => trace.show(trace.oneStep())), button("One call", () => trace.show(trace.oneCall())), button("All", () => trace.show([...trace.all])),
        button("−", () => trace.zoom(1 / 0.6)), button("+", () => trace.zoom(0.6))),
      map, trace.canvas, trace.legend()),
    make("p", { class: "hint" }, "Wheel zooms, drag pans. ", ...["←", "→", "+", "−", "↑", "↓", ",", ".", "Enter"].flatMap((key) => [make("kbd", {}, key), " "]),
      " Thin strips: the schedule's order, stretched over the step. A double click, or Enter, lists an event's operations."));
}

/** The whole run in a strip; the frame is what the trace shows. */
function overview(trace) {
  const canvas = sharpCanvas(26, (context, width) => {
    const [low, high] = trace.all, x = (time) => ((time - low) / (high - low || 1)) * width;
    context.fillStyle = themed("--lane"); context.fillRect(0, 4, width, 18);
    context.fillStyle = "#8794a3";
    for (const call of trace.calls) context.fillRect(x(call.start), 4, Math.max(1, x(call.end) - x(call.start)), 18);
    context.fillStyle = themed("--accent");
    for (const step of trace.steps) context.fillRect(x(step.start), 14, Math.max(1, x(step.end) - x(step.start)), 8);
    context.strokeStyle = themed("--ink"); context.lineWidth = 2;
    const start = Math.max(1, x(trace.view[0])), end = Math.min(width - 1, x(trace.view[1]));
    context.strokeRect(start, 2, Math.max(3, end - start), 22);
  }, { "aria-label": "The whole run; calls grey, recorded steps coloured, the frame is what the trace shows", role: "img" });
  canvas.style.marginBottom = "10px";
  canvas.removeAttribute("tabindex");
  const go = (event) => {
    const box = canvas.getBoundingClientRect(), share = (event.clientX - box.left) / box.width, span = trace.view[1] - trace.view[0];
    const middle = trace.all[0] + share * (trace.all[1] - trace.all[0]);
    trace.show([middle - span / 2, middle + span / 2]);
  };
  canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); go(event); });
  canvas.addEventListener("pointermove", (event) => { if (event.buttons) go(event); });
  trace.follower = canvas.redraw;
  return canvas;
}
