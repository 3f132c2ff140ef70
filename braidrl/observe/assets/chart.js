// Shows the values of the step under the pointer, and marks the same step in every other chart.
"use strict";
const charts = [...document.querySelectorAll("figure.chart")].map((figure) => {
  const tip = document.createElement("div");
  tip.className = "tip";
  figure.append(tip);
  const svg = figure.querySelector("svg");
  return { figure, svg, tip, cursor: svg.querySelector(".cursor"), data: JSON.parse(figure.querySelector("script").textContent) };
});

function nearest(positions, x) {
  let best = 0;
  positions.forEach((position, i) => {
    if (Math.abs(position - x) < Math.abs(positions[best] - x)) best = i;
  });
  return best;
}

function mark(chart, index) {
  chart.cursor.setAttribute("x1", chart.data.x[index]);
  chart.cursor.setAttribute("x2", chart.data.x[index]);
  chart.cursor.style.visibility = "visible";
}

function row(series, value) {
  const line = document.createElement("div"), swatch = document.createElement("i"), number = document.createElement("b");
  line.className = "row";
  swatch.style.background = series.colour;
  number.textContent = value;
  line.append(swatch, series.name, number);
  return line;
}

function show(chart, event) {
  const area = chart.svg.getBoundingClientRect(), scale = chart.svg.viewBox.baseVal.width / area.width;
  const index = nearest(chart.data.x, (event.clientX - area.left) * scale), step = chart.data.steps[index];
  const head = document.createElement("div");
  head.className = "head";
  head.textContent = `step ${step}`;
  const known = chart.data.series.filter((series) => series.values[index] !== null);
  chart.tip.replaceChildren(head, ...known.map((series) => row(series, series.values[index])));
  const outer = chart.figure.getBoundingClientRect(), x = event.clientX - outer.left;
  chart.tip.style.left = `${x + chart.tip.offsetWidth + 22 > outer.width ? x - chart.tip.offsetWidth - 12 : x + 14}px`;
  chart.tip.style.top = `${event.clientY - outer.top + 14}px`;
  chart.tip.style.visibility = "visible";
  for (const other of charts) {
    const same = other === chart ? index : other.data.steps.indexOf(step);
    if (same >= 0) mark(other, same);
    else other.cursor.style.visibility = "hidden";
  }
}

for (const chart of charts) {
  chart.svg.addEventListener("pointermove", (event) => show(chart, event));
  chart.svg.addEventListener("pointerleave", () => {
    chart.tip.style.visibility = "hidden";
    for (const other of charts) other.cursor.style.visibility = "hidden";
  });
}
