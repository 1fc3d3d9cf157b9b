// A trace that is steered: hover, wheel, drag and keys; and the strip of the whole run.

const WORDS = {
  sum: "add to gradient sums", gather: "gather over replicas", copy: "copy weights", exchange: "all-reduce gradients",
  update: "update weights", share: "share weights",
};

class Trace extends TracePicture {
  constructor(entry, { compact = false, on = "devices", goTo = null } = {}) {
    super(entry, { compact, on });
    this.goTo = goTo;
    this.listen();
  }

  /** The event at a point, as [lane, index], or the host's, or nothing. */
  at(x, y, width) {
    const lane = this.lanes[Math.floor((y - this.top) / this.rowHeight)];
    if (!lane || x < this.left) return null;
    const time = this.time(x, width), slack = 2 * (this.view[1] - this.view[0]) / width;
    const i = firstEndingAfter(lane, time - slack);
    return i < lane.size && lane.start[i] <= time + slack ? [lane, i] : null;
  }

  words([lane, i]) {
    const task = this.tasks[lane.task[i]], batch = lane.batch[i], computes = this.computes[lane.task[i]];
    const lines = [computes ? `${capital(PHASES[task.phase])} of stage ${task.stage}, micro-batch ${batch}` : `${capital(WORDS[task.kind] || task.kind)}${task.stage >= 0 ? ` of stage ${task.stage}` : ""}${batch >= 0 ? `, micro-batch ${batch}` : ""}`];
    if (task.stage >= 0) lines.push(`blocks ${this.profile.stages[task.stage]}`);
    const { columns, rows: operations } = this.profile.operations, [at, where] = ["task", "where"].map((name) => columns.indexOf(name));
    const first = computes && operations.find((row) => row[at] === lane.task[i]);
    if (first) lines.push(first[where]);
    const ipu = this.on === "cores" && task.ipu >= 0 ? `, for ipu ${task.ipu}` : "";
    lines.push(`${units.time(lane.end[i] - lane.start[i])} on ${lane.name}${ipu}${lane.replica[i] < 0 ? "" : `, replica ${lane.replica[i]}`}`);
    lines.push(this.on === "cores" ? `step ${lane.step[i]}, call ${lane.call[i]}` : "simulated with the recorded costs");
    return lines;
  }

  /** What each lane does at a time, in words. */
  runningAt(time) {
    return this.lanes.map((lane) => {
      const i = firstEndingAfter(lane, time), runs = i < lane.size && lane.start[i] <= time;
      const [words] = runs ? this.words([lane, i]) : ["waits"];
      return runs ? `${lane.name}: ${words[0].toLowerCase()}${words.slice(1)}` : `${lane.name} ${words}`;
    });
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
    if (this.onchoose) this.onchoose();
  }

  select(range) {
    this.range = range && [Math.min(...range), Math.max(...range)];
    this.canvas.redraw();
    if (this.onselect) this.onselect();
  }

  listen() {
    const canvas = this.canvas;
    let dragged = null;
    const position = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top, box.width]; };
    canvas.addEventListener("pointermove", (event) => {
      const [x, y, width] = position(event);
      if (dragged) {
        if (dragged.from !== null) { this.select([dragged.from, this.time(x, width)]); return; }
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
      const [x, , width] = position(event);
      dragged = { x, view: [...this.view], moved: false, from: event.shiftKey ? this.time(x, width) : null };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", (event) => {
      const [x, y, width] = position(event);
      if (dragged && !dragged.moved && dragged.from === null) this.choose(this.at(x, y, width), { follow: false });
      dragged = null;
    });
    canvas.addEventListener("dblclick", () => this.openOperations());
    canvas.addEventListener("wheel", (event) => {
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (!sideways && !event.ctrlKey) return; // the page scrolls
      event.preventDefault();
      const [x, , width] = position(event);
      if (sideways) this.pan(event.deltaX / width);
      else this.zoom(Math.exp(event.deltaY * 0.0016), this.time(x, width));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const actions = {
      ArrowLeft: () => this.pan(-0.15), ArrowRight: () => this.pan(0.15), "+": () => this.zoom(0.7), "=": () => this.zoom(0.7), "-": () => this.zoom(1 / 0.7),
      a: () => this.pan(-0.15), d: () => this.pan(0.15), w: () => this.zoom(0.7), s: () => this.zoom(1 / 0.7),
      Home: () => this.show(this.oneStep()), 0: () => this.show([...this.all]), ".": () => this.next(1), ",": () => this.next(-1),
      ArrowDown: () => this.lane(1), ArrowUp: () => this.lane(-1), Enter: () => this.openOperations(), Escape: () => { tip.hide(); this.select(null); this.choose(null); },
      "[": () => this.chosen && this.select([this.chosen[0].start[this.chosen[1]], this.range ? this.range[1] : this.chosen[0].end[this.chosen[1]]]),
      "]": () => this.chosen && this.select([this.range ? this.range[0] : this.chosen[0].start[this.chosen[1]], this.chosen[0].end[this.chosen[1]]]),
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[event.key]();
  }

  next(step) {
    if (!this.chosen) { this.lane(0); return; }
    const [lane, i] = this.chosen;
    let j = i + step;
    while (j >= 0 && j < lane.size && !this.computes[lane.task[j]]) j += step;
    if (j >= 0 && j < lane.size) this.choose([lane, j]);
  }

  lane(step) {
    const number = this.chosen ? this.lanes.indexOf(this.chosen[0]) + step : 0, lane = this.lanes[number];
    if (!lane || !lane.size) return;
    let i = firstEndingAfter(lane, this.chosen ? this.chosen[0].start[this.chosen[1]] : this.view[0]);
    while (i < lane.size - 1 && !this.computes[lane.task[i]]) i += 1;
    this.choose([lane, Math.min(i, lane.size - 1)]);
  }

  /** The transfers to and from the chosen computation: [from lane, index, to lane, index, bytes]. */
  transfers() {
    if (!this.chosen) return [];
    if (this.known && this.known.of === this.chosen) return this.known.found;
    const [lane, i] = this.chosen, task = lane.task[i], moves = this.moves.filter((row) => row.channel && row.phase), found = [];
    const key = (row) => [this.unit(row), lane.batch[i], lane.replica[i], lane.call[i], lane.step[i]].join();
    for (const move of moves.filter((row) => this.unit(row.task) === this.unit(task))) {
      const sends = move.kind === "send";
      const other = moves.find((row) => row.kind !== move.kind && row.channel === move.channel && row.ipu === move.peer && row.peer === move.ipu);
      const place = other && this.places().get(key(other.task));
      if (place) found.push(sends ? [lane, i, ...place, move.bytes] : [...place, lane, i, move.bytes]);
    }
    this.known = { of: this.chosen, found };
    return found;
  }

  /** What an event is a run of: a row of the table; on separate devices an action. */
  unit(row) {
    const { phase, stage } = this.tasks[row];
    return this.on === "devices" && phase ? phase + stage : row;
  }

  /** Where each event is, by its unit, micro-batch, replica, call and step. */
  places() {
    if (!this.index) {
      this.index = new Map();
      for (const lane of this.lanes) for (let i = 0; i < lane.size; i++) this.index.set([this.unit(lane.task[i]), lane.batch[i], lane.replica[i], lane.call[i], lane.step[i]].join(), [lane, i]);
    }
    return this.index;
  }

  openOperations() {
    if (!this.chosen || !this.goTo) return;
    const task = this.tasks[this.chosen[0].task[this.chosen[1]]];
    if (task.stage >= 0) this.goTo("operations", { stage: task.stage, phase: task.phase });
  }

  /** Choose the first computation of a piece in a typical step. */
  find(phase, stage) {
    const begin = this.oneStep()[0];
    for (const lane of this.lanes) {
      for (let i = firstEndingAfter(lane, begin); i < lane.size; i++) {
        const task = this.tasks[lane.task[i]];
        if (this.computes[lane.task[i]] && task.phase === phase && task.stage === stage) {
          const span = (lane.end[i] - lane.start[i]) * 6;
          this.show([lane.start[i] - span / 3, lane.start[i] + (2 * span) / 3]);
          this.choose([lane, i], { follow: false });
          return true;
        }
      }
    }
    return false;
  }
}

/** The whole run in a strip; the frame is what the trace shows. */
function overview(trace) {
  const canvas = sharpCanvas(26, (context, width) => {
    const [low, high] = trace.all, x = (time) => ((time - low) / (high - low || 1)) * width;
    context.fillStyle = themed("--lane"); context.fillRect(0, 4, width, 18);
    context.fillStyle = firm(OTHER, themed("--lane"));
    for (const call of trace.calls) context.fillRect(x(call.start), 5, Math.max(1, x(call.end) - x(call.start) - 1), 7);
    context.fillStyle = themed("--accent");
    for (const step of trace.steps) context.fillRect(x(step.start), 14, Math.max(1, x(step.end) - x(step.start) - 1), 7);
    const start = Math.max(1, x(trace.view[0])), end = Math.min(width - 1, x(trace.view[1]));
    seamed(context, themed("--card"), themed("--ink"), 2, () => context.rect(start, 2, Math.max(3, end - start), 22));
  }, { "aria-label": "The whole run: calls above, recorded steps below; the frame is what the trace shows", role: "img" });
  canvas.style.marginBottom = "10px";
  canvas.removeAttribute("tabindex");
  const go = (event) => {
    const box = canvas.getBoundingClientRect(), share = (event.clientX - box.left) / box.width, span = trace.view[1] - trace.view[0];
    const middle = trace.all[0] + share * (trace.all[1] - trace.all[0]);
    trace.show([middle - span / 2, middle + span / 2]);
  };
  canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); go(event); });
  canvas.addEventListener("pointermove", (event) => { if (event.buttons) go(event); });
  return canvas;
}
