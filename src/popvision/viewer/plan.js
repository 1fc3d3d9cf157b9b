// A plan: machines, memory against its limit, and the estimated step.

function planView(entry, page) {
  const { table, advice, memory, drawn } = DATA.plan, [head, ...body] = table;
  const marked = body.map((row) => row.map((cell) => (cell === "NO" ? make("strong", { class: "bad" }, cell) : cell)));
  return make("div", {}, make("section", { class: "card" }, make("h2", {}, "Machines"), plainTable(head, marked, head.length)), warningList(advice),
    drawn ? stepCard(entry, page, drawn) : null,
    plannedMemory(memory),
    drawn ? make("div", { class: "columns" }, stageCard(entry.figures), usageCard(entry, "devices")) : null);
}

function stepCard(entry, page, drawn) {
  const trace = new Trace(entry, { compact: true });
  return make("section", { class: "card" },
    make("div", { class: "tools" }, make("h2", { style: { margin: "0" } }, `One step on ${drawn}`), make("span", { class: "spring" }), make("button", { type: "button", class: "plain", onclick: () => page.goTo("trace") }, "Open the trace")),
    trace.canvas, traceLegend(trace), make("p", { class: "hint", style: { marginTop: "8px" } }, "Nothing has run: the step is simulated with estimated costs. The numbers are micro-batches."));
}

/** A bar for each ipu; machines and choices that need the same memory stand together. */
function plannedMemory(estimates) {
  const same = new Map();
  for (const { name, fits, limit, needs } of estimates) {
    const key = JSON.stringify([limit, needs]);
    if (!same.has(key)) same.set(key, { limit, needs, names: [] });
    same.get(key).names.push(`${name} (${fits ? "fits" : "does not fit"})`);
  }
  const groups = [...same.values()], kinds = memoryKinds(groups.flatMap((group) => group.needs));
  return make("section", { class: "card" }, make("h2", {}, "Memory of each ipu, at most"),
    groups.flatMap(({ limit, needs, names }) => [make("h3", { style: { marginTop: "12px" } }, `${names.join("; ")}: limit ${units.bytes(limit)}`), memoryBars(needs, kinds, limit)]),
    legend([...kinds, ["limit", "var(--ink)"]]),
    make("details", {}, make("summary", {}, "As a table"), groups.map(({ needs, names }) => [make("h3", { style: { marginTop: "12px" } }, names.join("; ")), memoryTable(needs, kinds)])));
}
