// Operations and blocks: what each costs; a table that sorts, searches and leads to the trace.

/** A table whose headers sort. `columns`: name, value(row) to sort by, cell(row) to show, right-aligned; `sum(rows)`: what to say of those that were found. */
function sortable(columns, data, { sort, down = true, onrow = null, id, sum = () => "" }) {
  let by = sort, shown = 300, query = "";
  const body = make("tbody"), count = make("span", { class: "hint", "aria-live": "polite" });
  const heads = columns.map((column, i) => make("th", { class: column.right ? "right" : "", scope: "col" },
    make("button", { type: "button", onclick: () => { down = by === i ? !down : column.right; by = i; fill(); } }, column.name)));
  const more = make("button", { type: "button", class: "plain", onclick: () => { shown += 1000; fill(); } }, "Show more");
  function fill() {
    heads.forEach((head, i) => (i === by ? head.setAttribute("aria-sort", down ? "descending" : "ascending") : head.removeAttribute("aria-sort")));
    const wanted = matcher(query), chosen = data.filter((row) => wanted(row.search));
    chosen.sort((a, b) => { const x = columns[by].value(a), y = columns[by].value(b); return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1); });
    body.replaceChildren(...chosen.slice(0, shown).map((row) => make("tr", onrow ? { class: "link", tabindex: "0", onclick: () => onrow(row), onkeydown: (event) => { if (event.key === "Enter") onrow(row); } } : {},
      columns.map((column) => make("td", { class: `${column.right ? "right" : ""} ${column.class || ""}`, title: column.class === "where" ? row.where : null }, column.cell(row))))));
    count.textContent = `${chosen.length} of ${data.length}${sum(chosen)}`;
    more.hidden = chosen.length <= shown;
  }
  fill();
  const table = make("div", { class: "scroll" }, make("table", { id }, make("thead", {}, make("tr", {}, heads)), body));
  return { element: make("div", {}, table, more), count, search(text) { query = text; fill(); } };
}

/** A module as named_modules names it. */
function moduleName({ module }) {
  return module === "?" ? "not known" : module || "the model itself";
}

/** A long name that may end its line after its strokes. */
function breakable(text, after = /(?<=[/_])/) {
  return text.split(after).flatMap((part, i) => (i ? [make("wbr"), part] : [part]));
}

/** Modules under their parents, each with the time and memory of all that it contains; a row opens and closes. */
function moduleTree(entry) {
  const all = new Map(entry.groups.tree.map((row) => [row.path, row])), phases = phasesOf(entry.profile), below = new Map(), open = new Set([""]);
  const total = (row) => Object.values(row.ns).reduce((sum, ns) => sum + ns, 0), whole = all.size ? total(all.get("")) || 1 : 1;
  for (const { path } of all.values()) {
    if (!path) continue;
    const parent = path.includes(".") ? path.slice(0, path.lastIndexOf(".")) : "";
    below.set(parent, [...(below.get(parent) || []), path]);
  }
  for (let path = ""; (below.get(path) || []).length === 1;) { [path] = below.get(path); open.add(path); } // what has one part is opened
  const modules = all.size;
  for (const [parent, inner] of below) { // what is left is a row of its own
    const rest = { ns: {}, bytes: all.get(parent).bytes }, path = `${parent}.directly in forward`;
    for (const phase of phases) rest.ns[phase] = inner.reduce((ns, name) => ns - (all.get(name).ns[phase] || 0), all.get(parent).ns[phase] || 0);
    for (const name of inner) rest.bytes -= all.get(name).bytes;
    if (total(rest) > 0.0005 * whole) { all.set(path, rest); inner.push(path); }
  }
  const body = make("tbody");
  function line(path, depth) {
    const row = all.get(path), inner = below.get(path), name = path === "?" ? "not known" : path ? path.slice(path.lastIndexOf(".") + 1) : "the model";
    const toggle = () => { if (!open.delete(path)) open.add(path); fill(path); };
    return make("tr", {}, make("td", { style: { paddingLeft: `${8 + 20 * depth}px` } }, inner ? make("button", { type: "button", class: "toggle", "aria-expanded": String(open.has(path)), "data-path": path, onclick: toggle }, `${open.has(path) ? "▾" : "▸"} ${name}`) : name),
      make("td", { class: "right" }, make("span", { class: "share", style: { width: `${(70 * total(row)) / whole}px` } }), units.time(total(row))), make("td", { class: "right" }, units.share(total(row) / whole)),
      ...phases.map((phase) => make("td", { class: "right" }, row.ns[phase] ? units.time(row.ns[phase]) : "–")), make("td", { class: "right" }, row.bytes ? units.bytes(row.bytes) : "–"));
  }
  function fill(focus) {
    const lines = [], visit = (path, depth) => { lines.push(line(path, depth)); if (open.has(path)) (below.get(path) || []).forEach((inner) => visit(inner, depth + 1)); };
    if (all.size) visit("", 0);
    body.replaceChildren(...lines);
    if (focus !== undefined) body.querySelector(`[data-path="${CSS.escape(focus)}"]`).focus();
  }
  fill();
  const head = ["module", "time", "share", ...phases.map((phase) => PHASES[phase]), "held, a micro-batch"];
  const element = make("div", { class: "scroll" }, make("table", { id: "tree" }, make("thead", {}, make("tr", {}, head.map((name, i) => make("th", { class: i ? "right" : "", scope: "col" }, name)))), body));
  return { element, count: make("span", { class: "hint" }, `${modules} modules`), search: () => {} };
}

// What operations of torch do, in words; an overload's name follows a dot.
const OPERATIONS = {
  mm: "matrix product", bmm: "matrix products of a batch", addmm: "matrix product plus bias", convolution: "convolution", convolution_backward: "gradients of a convolution",
  t: "transpose", transpose: "transpose", permute: "transpose", view: "reshape", _unsafe_view: "reshape", reshape: "reshape", expand: "repeat without a copy", clone: "copy", _to_copy: "convert the data type", copy: "copy",
  bernoulli: "random mask (dropout)", native_dropout: "dropout", _safe_softmax: "softmax", _softmax: "softmax", _softmax_backward_data: "gradient of softmax", _log_softmax: "log softmax", _log_softmax_backward_data: "gradient of log softmax",
  threshold_backward: "gradient of ReLU", gelu_backward: "gradient of GELU", tanh_backward: "gradient of tanh", sigmoid_backward: "gradient of sigmoid", native_layer_norm: "layer norm", native_layer_norm_backward: "gradient of a layer norm",
  native_batch_norm: "batch norm", native_batch_norm_backward: "gradients of a batch norm", nll_loss_forward: "negative log likelihood", nll_loss_backward: "gradient of the negative log likelihood", embedding: "look up rows", embedding_dense_backward: "gradient of an embedding",
  max_pool2d_with_indices: "max pooling", max_pool2d_with_indices_backward: "gradient of max pooling", scalar_tensor: "constant", full: "constant", where: "choose by a mask",
};
const inWords = (kind) => OPERATIONS[kind.split(".")[0]] || "";

function operationsView(entry, page) {
  const tasks = rows(entry.profile.tasks), operations = rows(entry.profile.operations);
  if (!operations.some((operation) => operation.calls)) return emptyCard("No operation was timed", "Operations are timed in the first two steps of a run.");
  const word = PHASES;
  const whole = operations.reduce((sum, operation) => sum + operation.ns, 0) || 1;
  const data = operations.filter((operation) => operation.calls).map((operation) => {
    const { phase, stage, ipu } = tasks[operation.task];
    return { ...operation, phase, stage, ipu, search: `${operation.kind} ${inWords(operation.kind)} ${operation.name} ${operation.block} ${moduleName(operation)} ${operation.where} ${word[phase]} stage${stage} ipu${ipu}`.toLowerCase() };
  });
  const grouped = (by) => entry.groups[by].filter((row) => row.calls).map((row) => ({ ...row, flops: row.flops / row.calls, bytes: row.bytes / row.calls, search: `${row[by]} ${by === "kind" ? inWords(row[by]) : ""} ${word[row.phase]} stage${row.stage} ipu${row.ipu}`.toLowerCase() }));
  const several = (number) => (number < 0 ? "several" : String(number));
  const dot = (row) => make("span", { class: "dot", style: { background: phaseColour(row.phase) } });
  const columns = {
    kind: { name: "operation", class: "kind", value: (row) => row.kind, cell: (row) => (inWords(row.kind) ? [inWords(row.kind), " ", make("span", { class: "hint" }, breakable(row.kind))] : breakable(row.kind)) },
    block: { name: "block", value: (row) => row.block, cell: (row) => [dot(row), row.block] },
    module: { name: "module", class: "module", value: (row) => row.module, cell: (row) => breakable(moduleName(row), /(?<=[._])/) },
    where: { name: "line", class: "where", value: (row) => row.where, cell: (row) => breakable(row.where.split("/").slice(-2).join("/")) },
  };
  const common = [
    { name: "phase", value: (row) => row.phase, cell: (row) => word[row.phase] },
    { name: "stage", right: true, value: (row) => row.stage, cell: (row) => several(row.stage) },
    { name: "ipu", right: true, value: (row) => row.ipu, cell: (row) => several(row.ipu) },
  ];
  const figures = [
    { name: "time", right: true, value: (row) => row.ns, cell: (row) => [make("span", { class: "share", style: { width: `${(70 * row.ns) / whole}px` } }), units.time(row.ns)] },
    { name: "share", right: true, value: (row) => row.ns, cell: (row) => units.share(row.ns / whole) },
    { name: "calls", right: true, value: (row) => row.calls, cell: (row) => String(row.calls) },
    { name: "a call", right: true, value: (row) => row.ns / row.calls, cell: (row) => units.time(row.ns / row.calls) },
    { name: "FLOPs", right: true, value: (row) => row.flops, cell: (row) => (row.flops ? units.count(row.flops) : "–") },
    { name: "FLOP/s", right: true, value: (row) => row.flops * row.calls / (row.ns || 1), cell: (row) => (row.flops ? units.count((1e9 * row.flops * row.calls) / (row.ns || 1)) : "–") },
    { name: "bytes", right: true, value: (row) => row.bytes, cell: (row) => (row.bytes ? units.bytes(Math.round(row.bytes)) : "–") },
  ];
  const together = (found) => { const ns = found.reduce((sum, row) => sum + row.ns, 0); return `: ${units.time(ns)}, ${units.share(ns / whole)}`; };
  const onrow = (row) => page.goTo("trace", { phase: row.phase, stage: row.stage });
  const table = (id, first, rows, later = []) => { const all = [...first, ...figures.slice(0, 2), ...later, ...common, ...figures.slice(2)]; return sortable(all, rows, { sort: all.indexOf(figures[0]), onrow, id, sum: together }); };
  const ways = { module: moduleTree(entry), operation: table("by-operation", [columns.kind, columns.where], data, [columns.block, columns.module]) };
  for (const [name, by] of [["block", "block"], ["line", "where"], ["kind", "kind"]]) ways[name] = table(`by-${name}`, [columns[by]], grouped(by));
  const names = Object.keys(ways), holder = make("div"), counts = make("span");
  const search = make("input", { type: "search", placeholder: "Search, e.g. backward stage1", "aria-label": "Search", value: page.state.search || "", oninput: () => (page.state.rows === "module" ? switcher.children[names.indexOf("operation")].click() : show(page.state.rows)) });
  const hint = make("span", { class: "hint help" }, "Click a row to see it in the trace.");
  const flops = make("span", {}, "FLOPs of matrix products, convolutions and attention; bytes read and written by one call.");
  function show(name) {
    const way = ways[name];
    holder.replaceChildren(way.element); counts.replaceChildren(way.count);
    hint.hidden = flops.hidden = way === ways.module;
    way.search(search.value);
    page.note({ rows: name, search: search.value });
  }
  if (page.wish) search.value = `${word[page.wish.phase]} stage${page.wish.stage}`;
  const first = ways[page.state.rows] ? page.state.rows : search.value ? "operation" : "module"; // a search is in operations
  const switcher = choice("Rows", names.map((name) => `by ${name}`), names.indexOf(first), (i) => show(names[i]));
  show(first);
  const step = entry.profile.facts.detailed_step;
  const times = `Times of a step\u2019s micro-batches together, which add up to their stages; an operation\u2019s share was measured on replica 0 in step ${step[1]} of call ${step[0]}. `;
  return make("section", { class: "card" },
    make("div", { class: "tools" }, make("h2", { style: { margin: "0" } }, "Operations"), switcher, search, counts, make("span", { class: "spring" }), hint),
    holder,
    make("p", { class: "hint", style: { marginTop: "10px" } }, times, flops));
}
