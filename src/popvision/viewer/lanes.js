// What ran where and when, joined from a profile's tables: lanes of task runs, and the steps they belong to.

/** A lane for each core ("cores": what was recorded) or ipu ("devices": a simulated step), with arrays in order of time. */
function lanesOf({ profile, devices }, on) {
  const tasks = rows(profile.tasks), found = new Map(), computes = computing(tasks);
  const { columns, rows: runs } = on === "cores" ? profile.runs : devices;
  const at = Object.fromEntries(columns.map((name, i) => [name, i]));
  for (const run of runs) {
    const place = on === "cores" ? run[at.core] : tasks[run[at.task]].ipu;
    if (!found.has(place)) found.set(place, { place, name: on === "devices" ? `ipu ${place}` : coreName(profile, place), runs: [] });
    found.get(place).runs.push(run);
  }
  const lanes = [...found.values()].sort((a, b) => (a.place < 0) - (b.place < 0) || Math.abs(a.place) - Math.abs(b.place));
  for (const lane of lanes) {
    lane.runs.sort((a, b) => a[at.start] - b[at.start] || a[at.end] - b[at.end]);
    if (on === "devices") lane.runs = actionsOf(lane.runs, tasks, computes, at);
    lane.size = lane.runs.length;
    for (const name of ["start", "end"]) lane[name] = Float64Array.from(lane.runs, (run) => run[at[name]]);
    for (const name of ["task", "replica", "call", "step"]) lane[name] = Int32Array.from(lane.runs, (run) => run[at[name]]);
    lane.batch = Int32Array.from(lane.runs, (run) => run[at.micro_batch]);
    delete lane.runs;
  }
  return { lanes, tasks, computes };
}

/** "core 0"; if instances are joined, "core 1.0" of instance 1. */
function coreName({ facts }, place) {
  return facts.joined ? facts.joined.cores[place][1] : place < 0 ? "messages" : `core ${place}`;
}

/** An ipu runs the rows of an action one after another: they are one event, of the first row that computes. */
function actionsOf(runs, tasks, computes, at) {
  const found = [];
  for (const run of runs) {
    const last = found[found.length - 1], task = tasks[run[at.task]], before = last ? tasks[last[at.task]] : {};
    if (!task.phase || task.phase !== before.phase || task.stage !== before.stage || run[at.micro_batch] !== last[at.micro_batch]) { found.push([...run]); continue; }
    last[at.end] = run[at.end];
    if (!computes[last[at.task]]) last[at.task] = run[at.task];
  }
  return found;
}

/** Whether each row of the table runs operations of the model. */
const computing = (tasks) => tasks.map((task) => ["forward", "backward"].includes(task.kind));

/** Windows of the steps: from the first computation to the end of the last task. */
function stepsOf({ lanes, computes }) {
  const found = new Map();
  for (const lane of lanes) {
    for (let i = 0; i < lane.size; i++) {
      const key = `${lane.call[i]}.${lane.step[i]}`;
      const step = found.get(key) || { call: lane.call[i], step: lane.step[i], start: Infinity, end: -Infinity };
      if (computes[lane.task[i]]) step.start = Math.min(step.start, lane.start[i]);
      step.end = Math.max(step.end, lane.end[i]);
      found.set(key, step);
    }
  }
  return [...found.values()].filter((step) => step.start < step.end).sort((a, b) => a.start - b.start);
}

/** Index of the first action of a schedule at a tick or later. */
const firstTick = (ticks, tick) => countWhile(ticks.length, (i) => ticks[i].tick < tick);

/** Index of the first event that ends after a time: events of a lane follow one another. */
const firstEndingAfter = (lane, time) => countWhile(lane.size, (i) => lane.end[i] <= time);
