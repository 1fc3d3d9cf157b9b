// The execution trace: a row for each core with the host above, or one for each ipu with the schedule's order under it.
// This file draws it; steer.js lets it be moved and asked.

/** How many other stages stand before each stage in its row; null if no row has several. */
function profileShades({ stages, ipus }, on) {
  const shades = stages.map((_, stage) => (on === "cores" ? stage : ipus.slice(0, stage).filter((ipu) => ipu === ipus[stage]).length));
  return shades.some(Boolean) ? shades : null;
}

class TracePicture {
  constructor(entry, { compact = false, on = "devices" } = {}) {
    this.profile = entry.profile;
    this.compact = compact;
    this.on = on;
    Object.assign(this, lanesOf(entry, on));
    this.steps = stepsOf(this);
    this.ticks = new Map(); // by ipu
    for (const tick of on === "devices" ? rows(this.profile.schedule) : []) {
      if (!this.ticks.has(tick.ipu)) this.ticks.set(tick.ipu, []);
      this.ticks.get(tick.ipu).push(tick);
    }
    this.calls = on === "cores" ? rows(this.profile.calls) : [];
    this.host = on === "cores" ? rows(this.profile.host) : [];
    this.moves = entry.moves;
    this.tile = null; // of updates, see `hatch`
    const starts = this.lanes.filter((lane) => lane.size).map((lane) => lane.start[0]);
    const ends = this.lanes.filter((lane) => lane.size).map((lane) => lane.end[lane.size - 1]);
    this.all = [Math.min(...starts, ...this.calls.map((call) => call.start)), Math.max(...ends, ...this.calls.map((call) => call.end))];
    this.until = Infinity; // what begins later is not drawn: see `stepper`
    this.chosen = null; // [lane, index]: what the keyboard or a click has chosen
    this.shades = profileShades(this.profile, on); // of each stage; null if a row has one stage
    this.tall = compact ? 20 : Math.round(Math.max(20, Math.min(34, 560 / Math.max(1, this.lanes.length)))); // of a bar
    this.gap = 4; // below a bar; the order of the schedule takes 8 more
    this.top = compact || on === "devices" ? 22 : 62;
    this.canvas = sharpCanvas(this.height, (context, width) => this.draw(context, width), {
      class: compact ? "" : "pan", role: "img",
      "aria-label": "Execution trace. Arrows pan, plus and minus zoom, comma and full stop step through events, Enter lists an event's operations",
    });
    this.view = this.oneStep();
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

  get rowHeight() { return this.tall + this.gap; }
  get height() { return this.top + this.lanes.length * this.rowHeight + 8; }

  /** Show the order of the schedule under each row, stretched over the step, or hide it. */
  showOrder(shown) {
    this.gap = shown ? 12 : 4;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.redraw();
  }

  /** Where the clock of the axis begins. */
  get origin() { return this.steps.length ? this.steps[0].start : this.all[0]; }
  get left() { return this.compact ? 58 : 84; }
  x(time, width) { return this.left + ((time - this.view[0]) / (this.view[1] - this.view[0])) * (width - this.left); }
  time(x, width) { return this.view[0] + ((x - this.left) / (width - this.left)) * (this.view[1] - this.view[0]); }

  // ---- drawing

  draw(context, width) {
    const colours = Object.fromEntries(["ink", "soft", "grid", "lane", "card", "accent"].map((name) => [name, themed(`--${name}`)]));
    context.font = '11.5px system-ui, "DejaVu Sans", sans-serif';
    context.textBaseline = "middle";
    this.drawAxis(context, width, colours);
    context.save();
    context.beginPath();
    context.rect(this.left, 0, width - this.left, 4000);
    context.clip();
    if (!this.compact && this.on === "cores") this.drawHost(context, width, colours);
    this.drawn = 0;
    const [first, last] = this.seen(), inSight = [];
    this.lanes.forEach((lane, i) => {
      const top = this.top + i * this.rowHeight;
      if (top + this.rowHeight >= first && top <= last) inSight.push([lane, top]);
    });
    context.fillStyle = colours.lane;
    for (const [, top] of inSight) context.fillRect(this.left, top, width, this.tall);
    if (this.range) shadeRange(this, context, width, colours);
    for (const [lane, top] of inSight) this.drawLane(context, width, lane, top, colours);
    if (this.chosen) drawTransfers(this, context, width, colours);
    if (this.range) drawRange(this, context, width, colours);
    if (this.mark) this.drawMark(context, width, colours);
    context.restore();
    context.fillStyle = colours.ink;
    this.lanes.forEach((lane, i) => {
      context.fillText(lane.name, 4, this.top + i * this.rowHeight + this.tall / 2 + 0.5);
    });
  }

  /** From where to where the window shows the canvas; all of it goes on paper. */
  seen() {
    if (window.matchMedia("print").matches || !this.canvas.isConnected) return [0, Infinity];
    const { top } = this.canvas.getBoundingClientRect();
    return [-top, window.innerHeight - top];
  }

  drawAxis(context, width, colours) {
    const step = niceStep(this.view[1] - this.view[0], Math.max(2, (width - this.left) / 130));
    const { origin } = this;
    context.strokeStyle = colours.grid;
    context.fillStyle = colours.soft;
    for (let time = origin + Math.ceil((this.view[0] - origin) / step) * step; time < this.view[1]; time += step) {
      const x = Math.round(this.x(time, width)) + 0.5;
      context.beginPath(); context.moveTo(x, 16); context.lineTo(x, 4000); context.stroke();
      const away = Math.round(time - origin), digits = 1 + Math.ceil(Math.log10(Math.abs(away) / step + 1)); // neighbours differ
      const label = Math.abs(away) < step / 2 ? "0" : units.time(away, Math.min(15, Math.max(3, digits)));
      const wide = context.measureText(label).width;
      context.fillText(label, x + 3 + wide > width ? x - 3 - wide : x + 3, 9);
    }
  }

  drawHost(context, width, colours) {
    const y = 22, bar = (start, end, colour, name, top, tall) => {
      const x = Math.round(this.x(start, width)), wide = Math.max(1, Math.round(this.x(end, width)) - x), paint = barOn(colour, colours.lane);
      if (x > width || x + wide < this.left) return;
      context.fillStyle = paint.firm;
      context.fillRect(x, top, wide, tall);
      const at = Math.max(x, this.left);
      if (Math.min(x + wide, width) - at > 10 + context.measureText(name).width) { context.fillStyle = inkOn(paint.firm); context.fillText(name, at + 5, top + tall / 2 + 0.5); }
    };
    context.fillStyle = colours.lane;
    context.fillRect(this.left, y, width, 16);
    this.calls.forEach((call) => bar(call.start, call.end, OTHER, `call ${call.call}`, y, 16));
    this.host.forEach((event) => bar(event.start, event.end, event.kind === "loader" ? "#d55e00" : "#56b4e9", event.kind, y + 18, 12));
    context.restore();
    context.fillStyle = colours.ink;
    context.fillText("host", 4, y + 8);
    context.save();
    context.beginPath(); context.rect(this.left, 0, width - this.left, 4000); context.clip();
  }

  drawLane(context, width, lane, top, colours) {
    const { tall } = this, ideal = top + tall + 2, paints = this.paintsOn(colours.lane);
    let i = firstEndingAfter(lane, this.view[0]), painted = -1;
    for (; i < lane.size && lane.start[i] < this.view[1] && lane.start[i] <= this.until; i++) {
      const task = this.tasks[lane.task[i]], computes = this.computes[lane.task[i]];
      const x = Math.round(this.x(lane.start[i], width)), end = Math.max(x + 1, Math.round(this.x(lane.end[i], width)));
      if (end === painted) continue; // that pixel has its colour already
      painted = end;
      this.drawn += 1;
      const dim = this.wanted && !this.wanted(lane, i);
      if (this.wanted) context.globalAlpha = dim ? 0.15 : 1;
      this.drawEvent(context, computes ? "compute" : task.kind, paints[lane.task[i]], x, end - x, top, tall);
      if (computes && !dim) this.drawLabel(context, `${task.phase}${this.shades ? `${task.stage}.` : ""}${lane.batch[i]}`, paints[lane.task[i]].ink, Math.max(x, this.left), Math.min(end, width), top + tall / 2 + 0.5);
    }
    context.globalAlpha = 1;
    if (this.chosen && this.chosen[0] === lane) {
      const x = this.x(lane.start[this.chosen[1]], width), end = this.x(lane.end[this.chosen[1]], width);
      seamed(context, colours.card, colours.ink, 2, () => context.rect(x - 1, top - 1, Math.max(2, end - x) + 2, tall + 2));
    }
    if (this.gap > 4 && this.until === Infinity) this.drawOrder(context, width, lane, ideal, paints.actions);
  }

  /** The colours of each row of the table on a ground; `actions`: of phases. */
  paintsOn(ground) {
    if (!this.paints || this.paints.ground !== ground) {
      this.paints = this.tasks.map((task, i) => barOn(this.computes[i] ? phaseColour(task.phase, this.shades && this.shades[task.stage]) : OTHER, ground));
      const actions = Object.fromEntries(Object.keys(PHASES).map((phase) => [phase, barOn(phaseColour(phase), ground)]));
      Object.assign(this.paints, { ground, actions });
    }
    return this.paints;
  }

  drawEvent(context, kind, paint, x, wide, top, tall) {
    if (kind !== "compute" && kind !== "update") { // what surrounds a computation is half as high
      context.fillStyle = paint.firm;
      context.fillRect(x, top + Math.round(tall / 2), wide, tall - Math.round(tall / 2));
    } else if (wide < 4) {
      context.fillStyle = paint.firm;
      context.fillRect(x, top, wide, tall);
    } else { // one pixel less, so that neighbours are two
      context.fillStyle = paint.edge;
      context.fillRect(x, top, wide - 1, tall);
      context.fillStyle = kind === "update" ? this.hatch(context) : paint.fill;
      context.fillRect(x + 1, top + 1, wide - 3, tall - 2);
    }
  }

  /** Phase and micro-batch in the middle of a bar, if the bar is wide enough; narrower letters in a narrow bar. */
  drawLabel(context, label, ink, x, end, y) {
    const wide = end - x < 12 ? Infinity : context.measureText(label).width, fitting = Math.min(wide, end - x - 3); // measuring 100,000 narrow bars takes long
    if (fitting < 0.7 * wide) return;
    context.fillStyle = ink;
    context.fillText(label, (x + end - fitting) / 2, y, fitting < wide ? fitting : undefined);
  }

  hatch(context) {
    if (!this.tile) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = 6;
      const paint = tile.getContext("2d");
      paint.fillStyle = UPDATE; paint.fillRect(0, 0, 6, 6);
      paint.strokeStyle = "#c3ccd6"; paint.lineWidth = 1.2;
      paint.beginPath(); paint.moveTo(-1, 7); paint.lineTo(7, -1); paint.stroke();
      this.tile = context.createPattern(tile, "repeat");
    }
    return this.tile;
  }

  drawOrder(context, width, lane, top, paints) {
    const length = this.profile.facts.schedule_length;
    if (!length) return;
    const own = this.ticks.get(lane.place) || [];
    for (const step of this.steps) {
      if (step.end < this.view[0] || step.start > this.view[1]) continue;
      const unit = (step.end - step.start) / length;
      if ((unit * (width - this.left)) / (this.view[1] - this.view[0]) < 2) continue; // nobody could tell its actions apart
      for (let i = firstTick(own, Math.floor((this.view[0] - step.start) / unit)); i < own.length; i++) {
        const { tick, phase } = own[i], x = Math.round(this.x(step.start + tick * unit, width)), end = Math.round(this.x(step.start + (tick + 1) * unit, width));
        if (x > width) break;
        this.drawEvent(context, "compute", paints[phase], x, Math.max(1, end - x), top, 6);
      }
    }
  }

  /** A time of the other run, in a comparison. */
  drawMark(context, width, colours) {
    const x = this.x(this.mark.time, width), bottom = this.top + this.lanes.length * this.rowHeight;
    seamed(context, colours.card, colours.ink, 1.5, () => { context.moveTo(x, this.top - 18); context.lineTo(x, bottom); });
    const wide = context.measureText(this.mark.text).width, from = x > width / 2 ? x - 6 - wide : x + 6;
    context.fillStyle = colours.card;
    context.fillRect(from - 3, this.top - 18, wide + 6, 16);
    context.fillStyle = colours.ink;
    context.fillText(this.mark.text, from, this.top - 10);
  }
}
