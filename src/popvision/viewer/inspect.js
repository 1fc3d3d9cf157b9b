// The view of the trace: search, pinned details, a range's totals, transfers of what is chosen, and the same as tables.

const MOST_ROWS = 200;

/** The page's one switch: what the cores of this host did, or what separate devices would do. */
const ON = ["devices", "cores"];
function onSwitch(page) {
  return choice("On which machine", ["separate devices", "these cores"], ON.indexOf(page.on), (i) => page.show(ON[i]));
}

function traceView(entry, page) {
  const trace = new Trace(entry, { goTo: page.goTo, on: page.on });
  page.trace = trace;
  if (!trace.lanes.length) return emptyCard("Nothing was recorded", "The model was compiled, but no step of it was recorded.");
  const button = (name, label, action) => make("button", { type: "button", class: "plain", "aria-label": label, onclick: action }, name);
  const steps = make("select", { class: "plain", "aria-label": "Step", onchange: () => {
    const step = trace.steps[Number(steps.value)], margin = (step.end - step.start) * 0.02;
    trace.show([step.start - margin, step.end + margin]);
  } }, trace.steps.slice(0, 2000).map((step, i) => make("option", { value: i, selected: i === Math.min(2, trace.steps.length - 1) }, `step ${step.step} of call ${step.call}`)));
  const map = overview(trace), pinned = make("div", { id: "pinned", "aria-live": "polite" }), totals = make("div", { id: "range", "aria-live": "polite" });
  const table = eventTable(trace), [search, found] = eventSearch(trace, page, table.fill);
  let timer = null;
  trace.follower = ([from, to]) => {
    map.redraw();
    Object.assign(page.state, { from: Math.round(from), to: Math.round(to) });
    clearTimeout(timer); // browsers refuse an address that changes each frame
    timer = setTimeout(() => { if (trace.canvas.isConnected) { page.note({}); table.fill(); } }, 120);
  };
  trace.onchoose = () => pinned.replaceChildren(...pinnedOf(trace));
  trace.onselect = () => totals.replaceChildren(...totalsOf(trace));
  const [from, to] = ["from", "to"].map((name) => Number.parseFloat(page.state[name]));
  if (from < to) trace.show([from, to]);
  return make("div", {},
    make("section", { class: "card" },
      make("div", { class: "tools" }, make("h2", { style: { margin: "0" } }, "What ran when"), onSwitch(page), make("span", { class: "spring" }),
        stepper(trace), svgButton(entry, trace)),
      make("div", { class: "tools" },
        search, found, make("span", { class: "spring" }), page.on === "cores" ? steps : null, button("One step", null, () => trace.show(trace.oneStep())), page.on === "cores" ? button("One call", null, () => trace.show(trace.oneCall())) : null, button("All", null, () => trace.show([...trace.all])),
        make("span", { class: "group" }, button("−", "Zoom out", () => trace.zoom(1 / 0.6)), button("+", "Zoom in", () => trace.zoom(0.6)))),
      trace.said, map, trace.canvas, traceLegend(trace), pinned, totals, table.element),
    make("p", { class: "hint help" }, HELP.split("`").map((part, i) => (i % 2 ? make("kbd", {}, part) : part))));
}

const HELP = "Ctrl + wheel zooms, drag pans, Shift + drag (or `[` and `]` at events) selects a range, a click pins an event, and a double click (or `Enter`) lists its operations. `W` `+` zoom in, `S` `−` out; `A` `←` and `D` `→` pan; `↑` `↓` go to another row, `,` `.` to another event; `Esc` ends the selection.";

function traceLegend(trace) {
  const { profile, on, lanes } = trace;
  const all = profile.facts.schedule_micro_batches, drawn = lanes.reduce((most, lane) => lane.batch.reduce((a, b) => Math.max(a, b + 1), most), 0);
  const names = legend([...phasesOf(profile).map((phase) => [PHASES[phase], phaseColour(phase)]), ["weight update", `repeating-linear-gradient(135deg,${UPDATE} 0 3px,#c3ccd6 3px 4px)`], ["sums and others", OTHER], ["waiting", "var(--lane)"]]);
  names.append(make("span", {}, trace.shades ? "F1.0: stage 1, micro-batch 0; lighter: a later stage" : "F0: micro-batch 0"));
  if (on === "devices" && profile.schedule.rows.length) names.append(make("label", {}, make("input", { type: "checkbox", onchange: (event) => trace.showOrder(event.target.checked) }), " under each row the order of the schedule"));
  return on === "devices" && drawn < all ? make("div", {}, names, make("p", { class: "hint", style: { marginTop: "8px" } }, `Only the first ${drawn} of ${all} micro-batches are drawn, and the updates after them.`)) : names;
}

// ---- step through, and save

/** Buttons that show what is in sight event by event, and, as `trace.said`, what runs then. */
function stepper(trace) {
  const said = make("p", { class: "hint", id: "said", "aria-live": "polite" });
  let starts = [], at = -1;
  function go(by) {
    if (at < 0) {
      const inSight = trace.lanes.flatMap((lane) => [...lane.start].filter((start, i) => start < trace.view[1] && lane.end[i] > trace.view[0]));
      starts = [...new Set(inSight)].sort((a, b) => a - b);
    }
    at += by;
    if (at < 0 || at >= starts.length) at = -1;
    trace.until = at < 0 ? Infinity : starts[at];
    said.textContent = at < 0 ? "" : `${at + 1} of ${starts.length}, after ${units.time(trace.until - trace.origin)}: ${trace.runningAt(trace.until).join("; ")}`;
    trace.canvas.redraw();
  }
  trace.said = said;
  const button = (name, label, by) => make("button", { type: "button", class: "plain", "aria-label": label, title: label, onclick: () => go(by) }, name);
  return make("span", { class: "group" }, button("◂", "One event back", -1), button("Step ▸", "Step through: the next event", 1));
}

function svgButton(entry, trace) {
  return make("button", { type: "button", class: "plain", title: "Save this picture, for slides", onclick: () => {
    const address = URL.createObjectURL(new Blob([traceSvg(entry, trace)], { type: "image/svg+xml" }));
    make("a", { href: address, download: `${DATA.title.replace(/\W+/g, "-")}.svg` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  } }, "Save SVG");
}

// ---- search

/** Whether an event has all words; nothing where there are none. */
function wantedBy(trace, query) {
  if (!query.trim()) return null;
  const found = matcher(query), matches = remembered((id, batch, replica, place) => {
    const task = trace.tasks[id];
    const text = `${task.kind} ${WORDS[task.kind] || ""} ${PHASES[task.phase] || ""} stage${task.stage} batch${batch} ipu${task.ipu} replica${replica} ${place} ${trace.profile.stages[task.stage] || ""}`.toLowerCase();
    return found(text);
  });
  return (lane, i) => matches(lane.task[i], lane.batch[i], lane.replica[i], lane.name.replace(" ", ""));
}

/** The field, and what it found. Enter walks through it, in order of time. */
function eventSearch(trace, page, changed) {
  const found = make("span", { class: "hint", id: "found", "aria-live": "polite" });
  let hits = [], at = -1;
  const input = make("input", { type: "search", placeholder: "Search, e.g. backward stage1", "aria-label": "Search events", value: page.state.search || "", oninput: () => { fill(); page.note({ search: input.value }); changed(); }, onkeydown: (event) => {
    if (event.key !== "Enter" || !hits.length) return;
    at = (at + (event.shiftKey ? hits.length - 1 : 1)) % hits.length;
    trace.choose(hits[at]);
    say();
  } });
  const say = () => { found.textContent = !trace.wanted ? "" : at < 0 ? `${hits.length} events, Enter leads to them` : `${at + 1} of ${hits.length}`; };
  function fill() {
    trace.wanted = wantedBy(trace, input.value);
    hits = []; at = -1;
    if (trace.wanted) for (const lane of trace.lanes) for (let i = 0; i < lane.size; i++) if (trace.wanted(lane, i)) hits.push([lane, i]);
    hits.sort(([a, i], [b, j]) => a.start[i] - b.start[j]);
    say();
    trace.canvas.redraw();
  }
  fill();
  return [input, found];
}

// ---- pinned details, and a range

function pinnedOf(trace) {
  if (!trace.chosen) return [];
  const [first, ...lines] = trace.words(trace.chosen), [lane, i] = trace.chosen;
  const ipu = (place, j) => trace.tasks[place.task[j]].ipu;
  const moved = trace.transfers().map(([from, k, to, j, bytes]) => `from ipu ${ipu(from, k)} to ipu ${ipu(to, j)}: ${units.bytes(bytes)}, read ${units.time(to.start[j] - from.end[k])} after it was computed`);
  return [make("h3", {}, first), make("ul", {}, [...lines, `from ${units.time(lane.start[i] - trace.origin, 7)} to ${units.time(lane.end[i] - trace.origin, 7)}`, ...moved].map((line) => make("li", {}, line))),
    trace.tasks[lane.task[i]].stage >= 0 ? make("button", { type: "button", class: "plain", onclick: () => trace.openOperations() }, "Its operations") : null,
    make("button", { type: "button", class: "plain", onclick: () => trace.choose(null) }, "Unpin")].filter(Boolean);
}

/** What each core or ipu did within the range, event by event; of those at its edges only what lies inside. */
function sumsIn(trace, [from, to]) {
  return trace.lanes.map((lane) => {
    const sums = { F: 0, B: 0, W: 0, update: 0, other: 0 };
    let events = 0;
    for (let i = firstEndingAfter(lane, from); i < lane.size && lane.start[i] < to; i++) {
      const task = trace.tasks[lane.task[i]];
      sums[trace.computes[lane.task[i]] ? task.phase : task.kind === "update" ? "update" : "other"] += Math.min(to, lane.end[i]) - Math.max(from, lane.start[i]);
      events += 1;
    }
    return { lane, events, ...sums, idle: Math.max(0, to - from - Object.values(sums).reduce((a, b) => a + b, 0)) };
  });
}

function totalsOf(trace) {
  if (!trace.range || trace.range[0] === trace.range[1]) return [];
  const sums = sumsIn(trace, trace.range), span = trace.range[1] - trace.range[0], phases = phasesOf(trace.profile), kinds = [...phases, "update", "other", "idle"];
  const idle = sums.reduce((sum, row) => sum + row.idle, 0) / (span * sums.length);
  const head = ["", "events", ...phases.map((phase) => PHASES[phase]), "update", "sums and others", "waiting"];
  return [make("h3", {}, `Range of ${units.time(span)}: ${units.share(1 - idle)} busy`), plainTable(head, sums.map((row) => [row.lane.name, String(row.events), ...kinds.map((kind) => units.time(row[kind]))])),
    make("button", { type: "button", class: "plain", onclick: () => trace.show(trace.range) }, "Zoom to it"), make("button", { type: "button", class: "plain", onclick: () => trace.select(null) }, "Clear")];
}

/** `left`: how many columns are words. */
function plainTable(head, body, left = 1) {
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, head.map((name, i) => make("th", { scope: "col", class: i < left ? "" : "right" }, name)))),
    make("tbody", {}, body.map((row) => make("tr", {}, row.map((cell, i) => make(i ? "td" : "th", { scope: i ? null : "row", class: i < left ? "" : "right" }, cell)))))));
}

/** The events in sight as a table, for readers of screens and for copying; filled while it is open. */
function eventTable(trace) {
  const holder = make("div"), element = make("details", { id: "events", ontoggle: () => fill() }, make("summary", {}, "The events in sight, as a table"), holder);
  function fill() {
    if (!element.open) return;
    const body = [], [from, to] = trace.view;
    let all = 0;
    for (const lane of trace.lanes) {
      for (let i = firstEndingAfter(lane, from); i < lane.size && lane.start[i] < to; i++) {
        if (trace.wanted && !trace.wanted(lane, i)) continue;
        all += 1;
        if (body.length < MOST_ROWS) body.push([lane.name, trace.words([lane, i])[0], units.time(lane.start[i] - trace.origin, 7), units.time(lane.end[i] - lane.start[i])]);
      }
    }
    holder.replaceChildren(plainTable(["where", "what", "began", "lasted"], body, 2), make("p", { class: "hint" }, all > body.length ? `The first ${body.length} of ${all}; zoom in or search for fewer.` : `${all} events.`));
  }
  return { element, fill };
}

// ---- drawn over the lanes

/** The range's corner and size. */
function rangeBox(trace, width) {
  const [x, end] = trace.range.map((time) => trace.x(time, width)), top = trace.top - 4;
  return [x, top, end - x, trace.lanes.length * trace.rowHeight + 4];
}

/** Under the events: what stands on them keeps its contrast. */
function shadeRange(trace, context, width, colours) {
  context.globalAlpha = 0.1; context.fillStyle = colours.accent;
  context.fillRect(...rangeBox(trace, width));
  context.globalAlpha = 1;
}

function drawRange(trace, context, width, colours) {
  seamed(context, colours.card, colours.accent, 1.5, () => context.rect(...rangeBox(trace, width)));
}

/** Arrows from sends to receives, for what the chosen event was given and gave. */
function drawTransfers(trace, context, width, colours) {
  for (const [from, i, to, j] of trace.transfers()) {
    const place = (lane, time) => [trace.x(time, width), trace.top + trace.lanes.indexOf(lane) * trace.rowHeight + trace.tall / 2];
    const [x, y] = place(from, from.end[i]), [u, v] = place(to, to.end[j]), angle = Math.atan2(v - y, u - x);
    seamed(context, colours.card, colours.ink, 1.5, () => {
      context.moveTo(x, y); context.lineTo(u, v);
      for (const side of [-0.4, 0.4]) { context.moveTo(u, v); context.lineTo(u - 9 * Math.cos(angle + side), v - 9 * Math.sin(angle + side)); }
    });
  }
}
