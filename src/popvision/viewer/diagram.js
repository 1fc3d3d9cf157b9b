// The model as a picture: stages in the order of the data, with their blocks, in as many rows as the window needs.

const BOX = { wide: 210, gap: 96, block: 54, below: 64, blocks: 12 };

/** The picture; drawn anew where another number of stages has place beside each other. */
function diagram(entry) {
  const holder = make("div", { class: "diagram" }), count = entry.profile.stages.length;
  let columns = 0;
  new ResizeObserver(() => requestAnimationFrame(() => { // not at once: it changes what is observed
    const found = Math.max(1, Math.min(count, Math.floor((holder.clientWidth + BOX.gap - 2) / (BOX.wide + BOX.gap))));
    if (found !== columns) holder.replaceChildren(stagesIn((columns = found), entry));
  })).observe(holder);
  return holder;
}

function stagesIn(columns, { profile, figures, moves }) {
  const blocks = rows(profile.blocks), boxes = placed(columns, profile, blocks), last = boxes[boxes.length - 1];
  const width = Math.min(columns, boxes.length) * (BOX.wide + BOX.gap) - BOX.gap + 2, height = last.y + last.tall + last.under + 2;
  const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": profile.stages.map((names, i) => `stage ${i}: ${names} on ipu ${profile.ipus[i]}`).join("; ") });
  boxes.forEach((box, stage) => {
    svg.append(...boxOf(box, stage, profile, figures));
    const sent = moves.find((part) => part.kind === "send" && part.phase === "F" && part.stage === stage && part.peer === profile.ipus[stage + 1]);
    if (stage + 1 < boxes.length) svg.append(...arrow(box, boxes[stage + 1], sent ? units.bytes(sent.bytes) : ""));
    if (box.before >= 0) svg.append(...wrapAround(boxes[box.before], box, `back on ipu ${profile.ipus[stage]}`));
  });
  return svg;
}

/** Where each stage stands, the stage before it on its ipu, and at which height under its row the line from there runs. */
function placed(columns, profile, blocks) {
  const boxes = profile.stages.map((_, stage) => {
    const own = blocks.filter((block) => block.stage === stage);
    return { blocks: own, x: (stage % columns) * (BOX.wide + BOX.gap) + 1, row: Math.floor(stage / columns), before: stage ? profile.ipus.lastIndexOf(profile.ipus[stage], stage - 1) : -1 };
  });
  let y = 1;
  for (let row = 0; row * columns < boxes.length; row++) {
    const own = boxes.slice(row * columns, (row + 1) * columns), tall = BOX.below + BOX.block * Math.min(BOX.blocks, Math.max(1, ...own.map((box) => box.blocks.length)));
    const ipus = own.map((_, i) => profile.ipus[row * columns + i]), back = [...new Set(ipus.filter((_, i) => own[i].before >= 0))]; // each ipu's line has a height of its own
    const under = back.length ? 28 * back.length + 8 : 0;
    own.forEach((box, i) => Object.assign(box, { y, tall, under, level: back.indexOf(ipus[i]) }));
    y += tall + under + 44;
  }
  return boxes;
}

function boxOf({ x, y, tall, blocks }, stage, profile, figures) {
  const time = figures.stages[stage], colour = "var(--accent)";
  return [
    make("rect", { x, y, width: BOX.wide, height: tall, rx: 12, fill: "none", stroke: "var(--grid)", "stroke-width": 1.5 }),
    make("text", { x: x + 14, y: y + 23, "font-weight": 650 }, `stage ${stage} on ipu ${profile.ipus[stage]}`),
    make("text", { x: x + 14, y: y + 41, class: "soft" }, time && time.total ? `${units.time(time.total)} a micro-batch` : ""),
    ...blocks.slice(0, BOX.blocks).flatMap((block, i) => {
      const top = y + 53 + i * BOX.block, more = blocks.length > BOX.blocks && i === BOX.blocks - 1;
      return [
        make("rect", { x: x + 10, y: top, width: BOX.wide - 20, height: 46, rx: 8, fill: colour, "fill-opacity": 0.16 }),
        make("rect", { x: x + 10, y: top + 8, width: 5, height: 30, fill: colour, stroke: "var(--edge)" }),
        make("text", { x: x + 22, y: top + 20 }, more ? `and ${blocks.length - BOX.blocks + 1} more` : shortened(block.name, 24)),
        make("text", { x: x + 22, y: top + 37, class: "soft" }, more ? "" : `${units.count(block.parameters)} parameters`),
      ];
    }),
  ];
}

function line(d, kind = null) {
  return make("path", { class: kind, d, fill: "none", stroke: "currentColor", "stroke-width": 1.6 });
}

/** To the next stage, which stands beside this one or begins the next row. */
function arrow(from, to, said) {
  const label = (x, y, anchor) => make("text", { x, y, "text-anchor": anchor, class: "soft" }, said);
  if (from.row === to.row) {
    const x = from.x + BOX.wide, y = from.y + from.tall / 2;
    return [line(`M${x + 6} ${y} H${to.x - 8} m-7 -5 l7 5 l-7 5`), label(x + BOX.gap / 2, y - 9, "middle")];
  }
  const x = from.x + BOX.wide - 30, y = from.y + from.tall + 6, end = to.x + BOX.wide - 30;
  return [line(`M${x} ${y} V${to.y - 20} H${end} V${to.y - 6} m-5 -7 l5 7 l5 -7`), label(end - 8, to.y - 26, "end")];
}

/** The data comes back to an ipu that it has passed: a line under the row; from another row only its end. */
function wrapAround(from, to, said) {
  const x = to.x + BOX.wide / 2 - 12, y = to.y + to.tall + 5, down = 12 + 28 * to.level;
  const start = from.row === to.row ? `M${from.x + BOX.wide / 2 + 12} ${y} v${down} H${x} v${2 - down}` : `M${x - 40} ${y + down} H${x} v${2 - down}`;
  return [line(`${start} m-5 7 l5 -7 l5 7`, "wrap"), make("text", { x: x - 4, y: y + down + 13, "text-anchor": "end", class: "soft" }, said)];
}

function shortened(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}
