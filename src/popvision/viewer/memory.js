// Memory: what each ipu needs against its capacity, and what it holds while a step runs.

function memoryView(entry) {
  const { figures, profile } = entry;
  if (!figures.needs.length) return emptyCard("No memory was measured", "The model was never put on its devices.");
  const kinds = memoryKinds(figures.needs);
  const verdict = figures.fits === null ? "" : figures.fits ? "Fits into " : "Does not fit into ";
  return make("div", {},
    make("section", { class: "card" },
      make("h2", {}, "What each ipu needs at the most"),
      figures.capacity ? make("p", { class: figures.fits === false ? "bad" : "good", style: { marginBottom: "10px" } }, `${verdict}${units.bytes(figures.capacity)}: this machine's memory, which all ipus share`) : null,
      memoryBars(figures.needs, kinds), legend(kinds), make("div", { style: { marginTop: "12px" } }, memoryTable(figures.needs, kinds)),
      make("p", { class: "hint", style: { marginTop: "8px" } }, "between: sent by another ipu and not received yet.")),
    liveness(entry, profile));
}

/** Those kinds of memory that some row has, with their colours. */
function memoryKinds(needs) {
  return MEMORY.filter(([name]) => needs.some((need) => need[name]));
}

/** A bar for each row. */
function memoryBars(needs, kinds) {
  const most = Math.max(...needs.map((need) => need.total), 1), share = (bytes) => `${(100 * bytes) / most}%`;
  return make("div", { class: "bars" }, needs.flatMap((need) => {
    const own = kinds.filter(([name]) => need[name]), said = (name) => `${name}: ${units.bytes(need[name])}`;
    return [
      make("span", { class: "name" }, need.name),
      make("div", { class: "bar", role: "img", "aria-label": own.map(([name]) => said(name)).join(", ") },
        own.map(([name, colour]) => make("i", { style: { width: share(need[name]), background: colour }, title: said(name) }))),
      make("span", { class: "number" }, units.bytes(need.total)),
    ];
  }));
}

function memoryTable(needs, kinds) {
  return plainTable(["memory", "total", ...kinds.map(([name]) => name)], needs.map((need) => [need.name, units.bytes(need.total), ...kinds.map(([name]) => units.bytes(need[name] || 0))]));
}

const HELD = "#cc79a7", LIVE = "#0072b2";

/** The curve over a step on separate devices. */
function liveness(entry, profile) {
  const ipus = Object.keys(entry.curves).filter((ipu) => entry.curves[ipu].length);
  if (!ipus.length) return emptyCard("No step was looked at closer", "The tensors that ipus hold are listed in the first two steps of a run.");
  const tensors = rows(profile.tensors), tasks = rows(profile.tasks), computes = computing(tasks), runs = rows(entry.devices);
  const made = new Map(rows(profile.operations).map((row) => [row.name, row]));
  const origin = (row) => made.has(row.name) ? [moduleName(made.get(row.name)), made.get(row.name).where.split("/").slice(-2).join("/")] : ["", ""];
  const state = { ipu: ipus[0], cursor: 0, always: false };
  const list = make("div", { class: "alive" }), title = make("h3", { "aria-live": "polite" });
  let points = [], own = [], held = [];

  function load() {
    const flat = entry.curves[state.ipu];
    points = []; held = [];
    for (let i = 0; i < flat.length; i += 2) points.push([flat[i], flat[i + 1]]);
    own = runs.filter((run) => String(tasks[run.task].ipu) === state.ipu);
    const run = new Map(own.map((row) => [`${row.task}.${row.micro_batch}`, row]));
    for (const row of tensors.filter((tensor) => String(tensor.ipu) === state.ipu)) {
      for (const born of own.filter((one) => one.task === row.born)) {
        const died = run.get(`${row.died}.${born.micro_batch}`);
        held.push({ ...row, micro_batch: born.micro_batch, from: row.kind === "activation" ? born.end : born.start, to: died ? died.end : Infinity });
      }
    }
    state.cursor = points.reduce((best, point) => (point[1] > best[1] ? point : best))[0];
    tell();
    canvas.redraw();
  }

  const bytesAt = (time) => points[Math.max(0, countWhile(points.length, (i) => points[i][0] <= time) - 1)][1];

  function tell() {
    const running = own.find((run) => run.start <= state.cursor && state.cursor < run.end);
    const alive = held.filter((row) => row.from <= state.cursor && state.cursor < row.to).sort((a, b) => b.bytes - a.bytes);
    const inside = running && computes[running.task] ? bytesAt(state.cursor) - alive.reduce((sum, row) => sum + row.bytes, 0) : 0;
    const need = entry.figures.needs.find((row) => String(row.ipu) === state.ipu);
    title.textContent = `At ${units.time(Math.round(state.cursor))}: ${units.bytes(bytesAt(state.cursor))} for micro-batches, ${units.bytes(need.always)} always` + (inside > 0 ? `; ${units.bytes(inside)} of it inside the ${PHASES[tasks[running.task].phase]} of stage ${tasks[running.task].stage}` : "");
    const always = [["weights", need.weights], ["buffers", need.buffers], ["gradient sums", need.gradients], ["optimizer state", need.optimizer]].filter(([, bytes]) => bytes);
    const line = (name, kind, batch, bytes, [module, where] = ["", ""]) => make("tr", {}, make("td", {}, name), make("td", {}, kind), make("td", { class: "right" }, batch), make("td", { class: "right" }, units.bytes(bytes)), make("td", {}, module), make("td", { class: "where" }, breakable(where)));
    list.replaceChildren(make("table", {},
      make("thead", {}, make("tr", {}, make("th", {}, "alive"), make("th", {}, "kind"), make("th", { class: "right" }, "micro-batch"), make("th", { class: "right" }, "bytes"), make("th", {}, "module"), make("th", {}, "line"))),
      make("tbody", {}, alive.slice(0, 200).map((row) => line(row.name, row.kind, String(row.micro_batch), row.bytes, origin(row))), always.map(([name, bytes]) => line(name, "always live", "", bytes)))));
  }

  const canvas = sharpCanvas(270, (context, width, height) => {
    const need = entry.figures.needs.find((row) => String(row.ipu) === state.ipu), base = state.always ? need.always : 0;
    const last = Math.max(points[points.length - 1][0], 1), most = Math.max(base + Math.max(...points.map((point) => point[1])), 1) * 1.06;
    const left = 84, bottom = height - 22, x = (time) => left + (time / last) * (width - left - 8), y = (bytes) => bottom - (bytes / most) * (bottom - 10);
    context.font = '11.5px system-ui, "DejaVu Sans", sans-serif';
    context.textBaseline = "middle";
    const card = themed("--card"), ink = themed("--ink"), [held, live] = [HELD, LIVE].map((colour) => barOn(colour, card));
    context.strokeStyle = themed("--grid"); context.fillStyle = themed("--soft");
    const size = 2 ** Math.max(0, Math.ceil(Math.log2(most / 5))); // bytes between lines: whole in their unit
    for (let value = 0; value <= most; value += size) {
      const at = Math.round(y(value)) + 0.5;
      context.beginPath(); context.moveTo(left, at); context.lineTo(width, at); context.stroke();
      context.fillText(units.bytes(value), 4, Math.max(8, at));
    }
    const step = niceStep(last, Math.max(2, (width - left) / 130));
    for (let time = 0; time < last; time += step) {
      const label = time ? units.time(time) : "0", wide = context.measureText(label).width;
      context.fillText(label, Math.min(x(time) + 2, width - wide), height - 9);
    }
    if (base) { context.fillStyle = live.firm; context.fillRect(left, y(base), width - left - 8, bottom - y(base)); }
    const path = () => {
      context.beginPath(); context.moveTo(x(0), y(base));
      let before = 0;
      for (const [time, bytes] of points) { context.lineTo(x(time), y(base + before)); context.lineTo(x(time), y(base + bytes)); before = bytes; }
      context.lineTo(x(last), y(base + before));
    };
    path(); context.lineTo(x(last), y(base)); context.closePath(); context.fillStyle = `${held.fill}66`; context.fill();
    path(); context.strokeStyle = held.firm; context.lineWidth = 1.4; context.stroke();
    seamed(context, card, ink, 1.5, () => { context.moveTo(x(state.cursor), 6); context.lineTo(x(state.cursor), bottom); });
    canvas.timeAt = (px) => Math.max(0, Math.min(last, ((px - left) / (width - left - 8)) * last));
  }, { role: "img", "aria-label": "Bytes held over one step. Left and right arrows move the cursor" });
  const move = (time) => { state.cursor = time; tell(); canvas.redraw(); };
  canvas.addEventListener("pointermove", (event) => { if (canvas.timeAt) move(canvas.timeAt(event.clientX - canvas.getBoundingClientRect().left)); });
  canvas.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!steps) return;
    event.preventDefault();
    const i = points.findIndex((point) => point[0] >= state.cursor);
    move(points[Math.max(0, Math.min(points.length - 1, (i < 0 ? points.length - 1 : i) + steps))][0]);
  });
  const always = make("input", { type: "checkbox", onchange: () => { state.always = always.checked; canvas.redraw(); } });
  load();
  return make("section", { class: "card" },
    make("div", { class: "tools" }, make("h2", { style: { margin: "0" } }, "Liveness over a step on separate devices"), make("span", { class: "spring" }),
      make("label", { class: "hint" }, always, " with what is always live"),
      choice("ipu", ipus.map((ipu) => `ipu ${ipu}`), 0, (i) => { state.ipu = ipus[i]; load(); })),
    canvas, legend([["held for micro-batches", HELD], ["always live", LIVE]]), make("div", { style: { marginTop: "12px" } }, title, list));
}
