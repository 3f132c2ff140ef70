// Draws the lanes of a timeline for the stretch that is looked at, and lets one look closer.
"use strict";
const box = document.getElementById("timeline");
const data = JSON.parse(box.querySelector("script").textContent);
const LANE = 26, GAP = 6, TOP = 30, COLUMN = 4, NARROW = 2.5;
const NAME_WIDTH = Math.min(220, 24 + 7 * Math.max(...data.lanes.map((name) => name.length)));
const whole = [0, Math.max(data.end, 1e-6)];
let view = whole.slice();

const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
const tip = document.createElement("div");
tip.className = "tip";
box.append(svg, tip);

function escaped(text) {
  const element = document.createElement("span");
  element.textContent = text;
  return element.innerHTML;
}

function seconds(value, digits) {
  return value.toFixed(digits).replace(/\B(?=(\d{3})+(?!\d))/g, value >= 10000 ? "," : "") + " s";
}

function width() {
  return Math.max(320, box.clientWidth - 28);
}

function laneTop(lane) {
  return TOP + lane * (LANE + GAP);
}

function toX(time) {
  return NAME_WIDTH + ((time - view[0]) / (view[1] - view[0])) * (width() - NAME_WIDTH);
}

function toTime(x) {
  return view[0] + ((x - NAME_WIDTH) / (width() - NAME_WIDTH)) * (view[1] - view[0]);
}

function ticks() {
  const rough = (view[1] - view[0]) / 8;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((size) => size >= rough);
  const result = [];
  for (let k = Math.ceil(view[0] / step); k * step <= view[1]; k++) result.push(k * step);
  return [result, Math.max(0, -Math.floor(Math.log10(step)))];
}

function colourOf(stage, waiting) {
  return waiting ? "url(#waiting)" : data.colours[stage];
}

function spanRectangle(span, number) {
  const [lane, stage, start, end, waiting] = span, inset = waiting ? 5 : 0;
  const left = Math.max(toX(start), NAME_WIDTH), wide = Math.min(toX(end), width()) - left;
  // A sliver of the lane stays between neighbours, where there is room for it.
  return `<rect x="${left.toFixed(2)}" y="${laneTop(lane) + inset}" width="${(wide > 4 ? wide - 1 : wide).toFixed(2)}"`
    + ` height="${LANE - 2 * inset}" rx="${wide > 8 && !waiting ? 3 : 0}" fill="${colourOf(stage, waiting)}" data-span="${number}"/>`;
}

// Spans too narrow to be seen apart become columns, in which a stage's height is its share of the column's time.
function addShares(shares, span) {
  const [lane, stage, start, end, waiting] = span, left = toX(start), right = toX(end);
  for (let column = Math.floor(left / COLUMN); column * COLUMN < right; column++) {
    const part = Math.min(right, (column + 1) * COLUMN) - Math.max(left, column * COLUMN);
    const place = `${lane} ${column}`, kind = 2 * stage + waiting;
    if (!shares.has(place)) shares.set(place, new Map());
    shares.get(place).set(kind, (shares.get(place).get(kind) || 0) + part / COLUMN);
  }
}

function shareRectangles([place, kinds]) {
  const [lane, column] = place.split(" ").map(Number), left = Math.max(column * COLUMN, NAME_WIDTH);
  const wide = Math.min((column + 1) * COLUMN, width()) - left;
  let bottom = laneTop(lane) + LANE;
  if (wide <= 0) return "";
  // What is worked on lies below, what is waited for on top of it.
  return [...kinds].sort(([a], [b]) => (a % 2) - (b % 2) || a - b).map(([kind, share]) => {
    const height = Math.min(share * LANE, bottom - laneTop(lane));
    bottom -= height;
    return `<rect x="${left}" y="${bottom.toFixed(2)}" width="${wide}" height="${height.toFixed(2)}"`
      + ` fill="${colourOf(kind >> 1, kind & 1)}"/>`;
  }).join("");
}

function spanRectangles() {
  const shares = new Map(), wide = [], scale = (width() - NAME_WIDTH) / (view[1] - view[0]);
  data.spans.forEach((span, number) => {
    const [, , start, end] = span;
    if (end < view[0] || start > view[1]) return;
    if ((end - start) * scale < NARROW) addShares(shares, span);
    else wide.push(spanRectangle(span, number));
  });
  return [...[...shares].map(shareRectangles), ...wide];
}

function draw() {
  const height = TOP + data.lanes.length * (LANE + GAP) + 4, total = width(), parts = [];
  svg.setAttribute("viewBox", `0 0 ${total} ${height}`);
  svg.style.height = `${height}px`;
  parts.push('<defs><pattern id="waiting" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    + '<line class="hatch" x1="0" y1="0" x2="0" y2="6"/></pattern></defs>');
  data.lanes.forEach((name, lane) => {
    const y = laneTop(lane);
    const shown = lane && data.lanes[lane - 1] === name ? "" : name.length > 30 ? name.slice(0, 29) + "…" : name;
    parts.push(`<rect class="lane" x="${NAME_WIDTH}" y="${y}" width="${total - NAME_WIDTH}" height="${LANE}" rx="3"/>`);
    parts.push(`<text class="lane-name" x="0" y="${y + LANE / 2 + 4}">${escaped(shown)}</text>`);
  });
  const [marks, digits] = ticks();
  for (const time of marks) {
    parts.push(`<text x="${toX(time)}" y="12" text-anchor="middle">${seconds(time, digits)}</text>`);
  }
  parts.push(...spanRectangles());
  let free = -Infinity;
  for (const [iteration, time] of data.iterations) {
    const x = toX(time);
    if (time < view[0] || time > view[1] || x - free < 0) continue;
    parts.push(`<line class="iteration" x1="${x}" x2="${x}" y1="18" y2="${height}"/>`);
    parts.push(`<text x="${x + 3}" y="26">${iteration}</text>`);
    free = x + 12 + 7 * String(iteration).length;
  }
  parts.push(`<rect class="chosen" y="${TOP}" height="${height - TOP}" width="0"/>`);
  svg.innerHTML = parts.join("");
}

function look(start, end) {
  const span = Math.min(Math.max(end - start, whole[1] * 1e-6), whole[1]);
  const from = Math.min(Math.max(start, 0), whole[1] - span);
  view = [from, from + span];
  tip.style.visibility = "hidden";
  draw();
}

const moves = {
  in: (s) => look(view[0] + s / 4, view[1] - s / 4),
  out: (s) => look(view[0] - s / 2, view[1] + s / 2),
  left: (s) => look(view[0] - s / 2, view[1] - s / 2),
  right: (s) => look(view[0] + s / 2, view[1] + s / 2),
  all: () => look(...whole),
};
for (const button of document.querySelectorAll("button[data-do]")) {
  button.addEventListener("click", () => moves[button.dataset.do](view[1] - view[0]));
}

function show(event) {
  const target = event.target.closest("[data-span]");
  tip.style.visibility = target ? "visible" : "hidden";
  if (!target) return;
  const [lane, stage, start, end, waiting, iteration, rows, tokens, version, role] = data.spans[Number(target.dataset.span)];
  const lines = [`<div class="head">${escaped(data.lanes[lane])} · ${escaped(role)}</div>`,
    `<div><b>${waiting ? "waiting for " : ""}${escaped(data.stages[stage])}</b></div>`,
    `<div>iteration ${iteration}${version === null ? "" : `, version ${version}`}</div>`,
    `<div>${seconds(end - start, 3)}, from ${seconds(start, 3)}</div>`];
  if (rows) lines.push(`<div>${rows.toLocaleString("en")} rows, ${tokens.toLocaleString("en")} tokens</div>`);
  tip.innerHTML = lines.join("");
  const area = box.getBoundingClientRect(), x = event.clientX - area.left;
  tip.style.left = `${x + tip.offsetWidth + 24 > area.width ? x - tip.offsetWidth - 12 : x + 14}px`;
  tip.style.top = `${event.clientY - area.top + 16}px`;
}

let pressed = null;
const positionOf = (event) => Math.max(NAME_WIDTH, event.clientX - svg.getBoundingClientRect().left);
svg.addEventListener("pointerdown", (event) => {
  pressed = positionOf(event);
  svg.setPointerCapture(event.pointerId);
});
svg.addEventListener("pointermove", (event) => {
  if (pressed === null) return show(event);
  const x = positionOf(event), chosen = svg.querySelector(".chosen");
  chosen.setAttribute("x", Math.min(pressed, x));
  chosen.setAttribute("width", Math.abs(x - pressed));
});
svg.addEventListener("pointerup", (event) => {
  const x = positionOf(event), from = pressed;
  pressed = null;
  if (from !== null && Math.abs(x - from) > 4) look(toTime(Math.min(x, from)), toTime(Math.max(x, from)));
});
svg.addEventListener("pointerleave", () => { tip.style.visibility = "hidden"; });
svg.addEventListener("dblclick", () => moves.all());
window.addEventListener("resize", draw);
draw();
