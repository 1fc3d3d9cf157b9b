// The page: which profile, which view; a fault is shown in words, never as an empty page.

const VIEWS = [
  ["headline", "Overview", headlineView], ["trace", "Trace", traceView], ["memory", "Memory", memoryView], ["operations", "Operations", operationsView],
  ["host", "Host", hostView], ["model", "Model and options", modelView], ["compare", "Compare", (_, page) => compareView(page)],
];

const page = {
  entry: 0, view: VIEWS[0][0], on: "devices", wish: null, trace: null, state: {}, // state: what the address says of the view

  /** Keep in the address how the view stands, so that it can be sent, and "back" leads to it. */
  note(changes) {
    Object.assign(page.state, changes);
    page.write("replaceState");
  },

  write(how) {
    if (location.protocol === "about:") return; // in a notebook's frame, which has no address of its own
    const said = Object.entries({ profile: page.entry || "", on: page.on === "devices" ? "" : page.on, ...page.state }).filter(([, value]) => value !== "" && value !== undefined);
    const address = `#${page.view}${said.length ? `?${new URLSearchParams(said)}` : ""}`;
    if (location.hash !== address) history[how](null, "", address);
  },

  /** Take the view from the address. */
  read() {
    const [view, query] = location.hash.slice(1).split("?"), { profile, on = "devices", ...state } = Object.fromEntries(new URLSearchParams(query));
    if (!VIEWS.some(([name]) => name === view)) return false;
    Object.assign(page, { view, state, on: ON.includes(on) ? on : "devices", wish: null, entry: DATA.entries[Number(profile)] ? Number(profile) : 0 });
    return true;
  },

  /** Switch between separate devices and these cores; a window of time belongs to one of them. */
  show(on) {
    const { from, to, ...state } = page.state;
    Object.assign(page, { on, state });
    page.render();
  },

  /** Show a view, optionally at a piece {phase, stage}. */
  goTo(view, wish = null) {
    if (view !== page.view) {
      page.write("replaceState");
      Object.assign(page, { view, state: {} });
      page.write("pushState"); // so that "back" leads back
    }
    page.wish = wish;
    page.render();
    document.getElementById(`tab-${view}`).focus();
    if (view === "trace" && wish && page.trace) page.trace.find(wish.phase, wish.stage);
  },

  render() {
    tip.hide();
    const entry = DATA.entries[page.entry], main = document.getElementById("main");
    for (const [name] of VIEWS) {
      const tab = document.getElementById(`tab-${name}`), chosen = name === page.view;
      tab.setAttribute("aria-selected", String(chosen));
      tab.tabIndex = chosen ? 0 : -1;
      if (chosen) tab.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
    main.setAttribute("aria-labelledby", `tab-${page.view}`);
    document.getElementById("about").replaceChildren(...(entry && entry.profile ? about(entry.profile) : "").split(" · ").flatMap((part, i) => [i ? " · " : "", make("span", { style: { whiteSpace: "nowrap" } }, part)]));
    if (!entry) main.replaceChildren(emptyCard("No profile", "This page was made of nothing: run a program with profiling on."));
    else if (entry.error && page.view !== "compare") main.replaceChildren(make("p", { class: "fault", role: "alert" }, entry.error));
    else main.replaceChildren(VIEWS.find(([name]) => name === page.view)[2](entry, page));
    page.write("replaceState");
    document.querySelectorAll("#profiles button").forEach((button, i) => button.setAttribute("aria-pressed", String(i === page.entry)));
  },
};

function about(profile) {
  const { versions = {}, made, cores, mode } = profile.facts;
  return `${mode} ${profile.training ? "training" : "inference"}, ${profile.stages.length} stages on ${new Set(profile.ipus).size} ipus · ${cores} cores · torch ${versions.torch} · ${made}`;
}

function start() {
  document.getElementById("title").textContent = DATA.title;
  const tabs = document.getElementById("tabs");
  tabs.append(...VIEWS.map(([name, title]) => make("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "main", onclick: () => page.goTo(name) }, title)));
  tabs.addEventListener("keydown", (event) => {
    const shift = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!shift) return;
    event.preventDefault();
    const at = VIEWS.findIndex(([name]) => name === page.view);
    page.goTo(VIEWS[(at + shift + VIEWS.length) % VIEWS.length][0]);
  });
  document.getElementById("main").setAttribute("role", "tabpanel");
  if (DATA.entries.length > 1) {
    const profiles = choice("Profile", DATA.entries.map(({ label }) => label.replace(/_(\d+)$/, ", plan $1")), 0, (i) => { Object.assign(page, { entry: i, state: {} }); page.render(); });
    profiles.id = "profiles";
    document.getElementById("profiles").replaceWith(profiles);
  } else document.getElementById("profiles").remove();
  const dark = window.matchMedia("(prefers-color-scheme: dark)"), root = document.documentElement;
  const paint = (theme) => { root.dataset.theme = theme; for (const canvas of document.querySelectorAll("canvas")) canvas.redraw(); };
  paint(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => paint(dark.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => paint(root.dataset.theme === "dark" ? "light" : "dark"));
  if (!page.read()) page.view = DATA.comparisons.length ? "compare" : VIEWS[0][0];
  page.render();
  window.addEventListener("popstate", () => { page.read(); page.render(); });
  const redraw = () => { for (const canvas of document.querySelectorAll("canvas")) canvas.redraw(); };
  for (const change of ["scroll", "resize"]) window.addEventListener(change, redraw, { passive: true }); // pictures draw what the window shows
  const drawAll = () => { for (const canvas of document.querySelectorAll("canvas")) canvas.drawNow(); };
  window.addEventListener("beforeprint", drawAll);
  window.matchMedia("print").addEventListener("change", drawAll); // paper has colours of its own
}

function fault(message) {
  const box = make("p", { class: "fault", role: "alert" }, `This page can't show the profile: ${message}\nIt may have been made by another version: run popvision on the folder again.`);
  document.getElementById("main").replaceChildren(box);
}

window.addEventListener("error", (event) => fault(event.message));
window.popvision = page; // for the console, and for tests
try {
  start();
} catch (error) {
  fault(error.message);
}
