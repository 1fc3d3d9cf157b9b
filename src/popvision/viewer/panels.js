// The headline, the host, the model and its options, and the comparison of two runs.

function emptyCard(title, text) {
  return make("section", { class: "card empty" }, make("strong", {}, title), text);
}

// Words of the figures that need a sentence, as a tooltip.
const MEANINGS = {
  "bubble of separate devices": "The share of time in which the ipus wait in a step that is simulated with the recorded costs of the stages.",
  "bubble with equal stages": "The bubble if each action takes one tick and nothing else takes time.",
  "a step on separate devices": "Simulated with the recorded costs: each ipu does one thing at a time, in the order of the schedule. Transfers take no time.",
  "a step on these cores": "The recorded time of a step, without the first call if there are others.",
  "a step without waits": "The computations\u2019 CPU time, divided by the number of cores: a step\u2019s time if each core always had a task.",
  "cores used by other programs": "The share of the computations\u2019 time in which their thread had no core.",
  "time without a ready task": "The recorded share of a step in which cores ran no task.",
  "sums and others": "Tasks of no phase, such as sums of gradients and gathers.",
};
const KINDS = { "bubble of separate devices": ", simulated", "a step on separate devices": ", simulated", "a step on these cores": ", recorded" };

/** Return a text in which fractions and their results do not break over lines. */
const unbroken = (text) => text && text.replace(/(?<=\d) (?=[/=] \d)|(?<=\d [/=]) (?=\d)/g, "\u00a0");

function tile(label, value, note, kind = "") {
  const [number, ...unit] = /^\d/.test(value) ? value.split(" ") : [value];
  return make("div", { class: "tile" }, make("div", { class: "label", title: MEANINGS[label] }, capital(label), KINDS[label]), make("div", { class: `value ${kind}` }, number, unit.length ? make("small", {}, ` ${unit.join(" ")}`) : null), make("div", { class: "note" }, [note].flat().filter(Boolean).flatMap((part) => [part, " "])));
}

function headlineView(entry, page) {
  const { figures, profile } = entry;
  const warnings = warningList(figures.warnings);
  if (!figures.calls) {
    const failed = profile.facts.failed_calls;
    return make("div", {}, warnings, failed ? emptyCard("No call finished", `${failed} failed.`) : emptyCard("Nothing was run", "The model was compiled and never called."), passesCard(profile, figures));
  }
  const slow = figures.slowest === null ? null : figures.stages[figures.slowest];
  const fits = figures.fits === null ? "" : `${figures.fits ? "Fits" : "Does not fit"} into ${units.bytes(figures.capacity)}.`;
  const remarks = { bubble: [unbroken(figures.facts.bubble)], apart: ["With the recorded costs."], here: [`${figures.cores} ran all ipus${figures.usages.length && figures.usages.length < profile.facts.threads ? ", because tasks are so short that others would wait for Python's lock" : ""}.`], memory: [fits, figures.facts.memory], throughput: [`${figures.calls} calls of ${figures.samples_per_call.toLocaleString("en")} samples.`] };
  const tiles = make("div", { class: "tiles" },
    Object.entries(remarks).map(([name, remark]) => {
      const [first, ...others] = figures.shown.filter(([tile]) => tile === name);
      return first ? tile(first[1], first[2], [...others.map(([, words, text]) => make("span", {}, make("span", { title: MEANINGS[words] }, capital(words)), `: ${text}.`)), ...remark], name === "memory" && figures.fits === false ? "bad" : "") : null;
    }),
    slow ? tile("slowest stage", `stage ${slow.stage}`, [`${slow.blocks}, ${units.time(slow.total)} a micro-batch.`, figures.facts.stages]) : null);
  const trace = new Trace(entry, { compact: true, on: page.on });
  page.miniature = trace;
  return make("div", {}, ...figures.about.map((text) => make("p", { style: { marginBottom: "12px" } }, text)), tiles, warnings,
    make("section", { class: "card" },
      make("div", { class: "tools" }, make("h2", { style: { margin: "0" } }, "One step"), onSwitch(page), make("span", { class: "spring" }), ...(trace.lanes.length ? [stepper(trace), svgButton(entry, trace)] : []), make("button", { type: "button", class: "plain", onclick: () => page.goTo("trace") }, "Trace")),
      ...(trace.lanes.length ? [trace.said, trace.canvas, traceLegend(trace)] : [make("p", { class: "hint" }, "No step was recorded as a whole.")])),
    make("div", { class: "columns" }, stageCard(figures), usageCard(entry, page.on)),
    passesCard(profile, figures));
}

function warningList(texts) {
  return texts.length ? make("ul", { class: "warnings", "aria-label": "Warnings" }, texts.map((text) => make("li", {}, text))) : null;
}

function stageCard(figures) {
  return make("section", { class: "card" }, make("h2", {}, "What a micro-batch costs, by stage: median CPU time"), stageBars(figures), legend([...Object.keys(PHASES).filter((phase) => figures.stages.some((stage) => stage.phases[phase])).map((phase) => [PHASES[phase], phaseColour(phase)]), ...(figures.stages.some((stage) => stage.around) ? [["sums and others", OTHER]] : [])]));
}

function usageCard({ figures, profile }, on) {
  const [title, usages, nameOf] = on === "cores" ? ["What these cores did", figures.usages, (core) => coreName(profile, core)] : ["What separate devices would do", figures.device_usages, (ipu) => `ipu ${ipu}`];
  return make("section", { class: "card" }, make("h2", {}, title), usageBars(usages, nameOf));
}

function stageBars(figures) {
  const most = Math.max(...figures.stages.map((stage) => stage.total), 1);
  return make("div", { class: "bars" }, figures.stages.flatMap((stage) => {
    const parts = [...Object.entries(stage.phases).map(([phase, ns]) => [ns, phaseColour(phase), PHASES[phase]]), [stage.around, OTHER, "sums and others"]];
    return [
      make("span", { class: "name", title: stage.blocks }, `${stage.stage} · ${stage.blocks}`),
      make("div", { class: "bar" }, parts.filter(([ns]) => ns).map(([ns, colour, name]) => make("i", { style: { width: `${(100 * ns) / most}%`, background: colour }, title: `${name}: ${units.time(ns)}` }))),
      make("span", { class: "number" }, units.time(stage.total)),
    ];
  }));
}

function usageBars(usages, nameOf) {
  const colours = { ...PHASE_COLOURS, update: UPDATE, other: OTHER, waiting: "transparent" }, words = { ...PHASES, other: "sums and others" };
  const shares = usages.slice(0, 64).map(({ place, spent, waiting }) => ({ place, spent: { ...spent, waiting } })), seen = Object.keys(colours).filter((name) => shares.some((use) => use.spent[name]));
  return make("div", { class: "bars" }, shares.flatMap(({ place, spent }) => {
    const whole = seen.reduce((sum, name) => sum + (spent[name] || 0), 0) || 1;
    return [
      make("span", { class: "name" }, nameOf(place)),
      make("div", { class: "bar" }, seen.filter((name) => spent[name]).map((name) => make("i", { style: { width: `${(100 * spent[name]) / whole}%`, background: colours[name] }, title: `${words[name] || name}: ${units.share(spent[name] / whole)}` }))),
      make("span", { class: "number" }, `${units.share(1 - spent.waiting / whole)} busy`),
    ];
  }));
}

function passesCard(profile, figures) {
  const passes = rows(profile.passes), colours = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8794a3"];
  if (!passes.length) return null;
  const whole = figures.compile_seconds || 1;
  return make("section", { class: "card" }, make("h2", {}, `Compilation: ${units.time(whole * 1e9)}`),
    make("div", { class: "bar" }, passes.map((pass, i) => make("i", { style: { width: `${(100 * pass.seconds) / whole}%`, background: colours[i % colours.length] } }))),
    legend(passes.map((pass, i) => [`${pass.name} ${units.time(pass.seconds * 1e9)}`, colours[i % colours.length]])));
}

function hostView(entry) {
  const { profile, figures } = entry, calls = rows(profile.calls), host = rows(profile.host);
  if (!calls.length) return emptyCard("No call ended", "The host's times are measured around calls.");
  const kinds = Object.entries(figures.host), most = Math.max(...kinds.map(([, value]) => value), 1e-9);
  const gaps = calls.map((call, i) => ({ call: call.call, lasted: call.end - call.start, gap: i && call.call === calls[i - 1].call + 1 ? call.start - calls[i - 1].end : null }));
  const bars = make("div", { class: "bars" }, kinds.flatMap(([name, value]) => [make("span", { class: "name" }, name), make("div", { class: "bar" }, make("i", { style: { width: `${(100 * value) / most}%`, background: name === "loader" ? "#d55e00" : "#56b4e9" } })), make("span", { class: "number" }, units.time(value * 1e9))]));
  const table = sortable([
    { name: "call", right: true, value: (row) => row.call, cell: (row) => String(row.call) },
    { name: "lasted", right: true, value: (row) => row.lasted, cell: (row) => units.time(row.lasted) },
    { name: "time before it", right: true, value: (row) => row.gap, cell: (row) => units.time(row.gap) },
  ], gaps.map((row) => ({ ...row, search: "" })), { sort: 0, down: false, id: "calls" });
  return make("div", {}, make("section", { class: "card" }, make("h2", {}, "Where the host's time went"), bars,
    make("p", { class: "hint", style: { marginTop: "10px" } }, "In the Trace tab, \u201cthese cores\u201d shows these calls in its top row, on the same clock."),
    host.length ? null : make("p", { class: "hint" }, "No waiting for a data loader and no copy of weights was noted.")),
    make("section", { class: "card" }, make("h2", {}, "Calls, and the time between them"), table.element));
}

/** A transfer in words: between ipus, or between an ipu and the host. */
function transfer({ kind, ipu, peer, phase, stage, bytes }) {
  const from = kind === "load" ? "host" : `ipu ${ipu}`, to = kind === "load" ? `ipu ${ipu}` : kind === "send" ? `ipu ${peer}` : "host";
  return [from, to, phase ? `each micro-batch, ${kind === "load" ? "before" : "after"} ${phase}${stage}` : "once per step", units.bytes(bytes)];
}

/** An option as a program writes it. */
function asWritten(option) {
  const profiling = option.name === "engineOptions" && /^\{'autoReport\.all': 'true', 'autoReport\.directory': '([^']*)'\}$/.exec(option.value);
  return profiling ? { ...option, name: "enableProfiling", value: profiling[1] } : option;
}

function modelView(entry) {
  const { profile } = entry, options = rows(profile.options).map(asWritten), moves = entry.moves.filter((part) => ["load", "send", "store"].includes(part.kind));
  const table = options.length
    ? make("div", { class: "scroll" }, make("table", { id: "options" }, make("thead", {}, make("tr", {}, ["option", "value", "default"].map((name) => make("th", {}, name)))), make("tbody", {}, options.map((row) => make("tr", {}, make("td", {}, row.name), make("td", {}, row.value), make("td", { class: "hint" }, row.default))))))
    : make("p", { class: "hint" }, "All options have their defaults.");
  const counts = Object.entries(profile.counts).map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`).join(" · ");
  const model = make("section", { class: "card" }, make("h2", {}, "Blocks, stages, ipus"), diagram(entry), make("p", { class: "hint", style: { marginTop: "8px" } }, counts),
    moves.length ? make("details", {}, make("summary", {}, "Transfers"), plainTable(["from", "to", "when", "bytes"], moves.map(transfer), 3)) : null);
  return make("div", {}, model,
    make("section", { class: "card" }, make("h2", {}, "Strategy and optimizer"), make("dl", { id: "runs" }, ["strategy", "optimizer"].flatMap((name) => [make("dt", {}, name), make("dd", {}, (profile.facts[name] || "not recorded").replace(/\bADAM/, "Adam").replace("RMSPROP", "RMSprop"))]))),
    make("section", { class: "card" }, make("h2", {}, "Options that differ from their defaults"), table));
}

/** Two runs: numbers side by side, and their traces from the start of a step on, in one scale. */
function compareView(page) {
  if (!DATA.comparisons.length) {
    return make("section", { class: "card" }, make("h2", {}, "Two runs side by side"), make("p", {}, "Run the program again with another folder for its profile. This command then writes a page with both runs:"), make("pre", { id: "command" }, `popvision compare ${/^[\w./-]+$/.test(DATA.folder) ? DATA.folder : `"${DATA.folder}"`} OTHER`));
  }
  return make("div", {}, DATA.comparisons.map((comparison) => {
    const entries = [DATA.entries[comparison.first], DATA.entries[comparison.second]];
    const head = ["", entries[0].label, entries[1].label, "ratio", "spread"];
    const body = comparison.rows.map((row) => make("tr", {}, make("td", {}, row.name),
      ...["first", "second"].map((side) => make("td", { class: `right ${row.better === side ? "good" : ""}` }, row[side], row.better === side ? " ✓" : "")),
      make("td", { class: "right" }, row.ratio === null ? "" : row.ratio.toFixed(2)),
      make("td", { class: "right" }, row.spread < 0.005 ? "" : `± ${units.share(row.spread)}`)));
    const traces = entries.map((entry) => new Trace(entry, { on: page.on }));
    align(traces);
    page.traces = traces;
    return make("div", {}, make("section", { class: "card" }, make("div", { class: "tools" }, make("h2", { style: { margin: "0" } }, "One step of each, from its start on, in one scale"), onSwitch(page)),
      traces.map((trace, i) => (trace.lanes.length ? make("div", { style: { marginBottom: "14px" } }, make("h3", {}, entries[i].label), trace.canvas) : null)), traceLegend(traces[0])),
    make("section", { class: "card" }, make("h2", {}, "Figures (✓: better)"), make("div", { class: "scroll" }, make("table", { class: "figures" }, make("thead", {}, make("tr", {}, head.map((name, i) => make("th", { class: i ? "right" : "" }, name)))), make("tbody", {}, body)))));
  }));
}

/** Both views start at their step's start, and moving one moves the other. */
function align(traces) {
  const [a, b] = traces;
  if (!a.steps.length || !b.steps.length) return;
  const origin = (trace) => trace.steps[Math.min(2, trace.steps.length - 1)].start;
  const limits = [Math.min(...traces.map((trace) => trace.all[0] - origin(trace))), Math.max(...traces.map((trace) => trace.all[1] - origin(trace)))];
  for (const trace of traces) trace.all = limits.map((time) => time + origin(trace)); // so that both can show what either has
  let busy = false;
  const couple = (one, other) => {
    one.follower = (view) => {
      if (busy) return;
      busy = true;
      other.view = view.map((time) => time - origin(one) + origin(other));
      other.canvas.redraw();
      busy = false;
    };
  };
  couple(a, b); couple(b, a);
  const span = Math.max(...traces.map((trace) => trace.view[1] - trace.view[0])), ends = traces.map((trace) => trace.steps.find((step) => step.start === origin(trace)).end - origin(trace));
  traces.forEach((trace, i) => {
    const ratio = ends[i] / ends[1 - i];
    trace.mark = { time: origin(trace) + ends[1 - i], text: `the other ends here, ${units.time(Math.abs(ends[0] - ends[1]))} ${ratio > 1 ? "earlier" : "later"}` };
    trace.top += 18; // for the mark's text, below the axis
    trace.showOrder(false);
  });
  a.show([origin(a) - 0.02 * span, origin(a) + 0.98 * span]);
}
