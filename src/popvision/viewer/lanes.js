// What ran where and when, joined from a profile's tables: lanes of events, and the steps they belong to.

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
        if (track.gaps && track.gaps.length) at += track.gaps[index];
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

/** Index of the first action of a schedule at a tick or later. */
const firstTick = (ticks, tick) => countWhile(ticks.length, (i) => ticks[i].tick < tick);

/** Index of the first event that ends after a time: events of a lane follow one another. */
const firstEndingAfter = (lane, time) => countWhile(lane.size, (i) => lane.end[i] <= time);
