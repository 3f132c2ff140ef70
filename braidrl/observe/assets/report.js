// Draws every chart when it comes into view, and shows the step under the pointer in all of them.
"use strict";
const style = getComputedStyle(document.documentElement);
const colour = (name) => style.getPropertyValue(name).trim();
const axis = { gridcolor: colour("--line"), zeroline: false, nticks: 6 };
const drawn = [];
let busy = false;

function draw(figure) {
  const plot = figure.querySelector(".plot");
  const { traces, stacked } = JSON.parse(figure.querySelector("script").textContent);
  const layout = {
    height: 210, margin: { l: 46, r: 8, t: 8, b: 24 }, showlegend: false, hovermode: "x unified", bargap: 0.1,
    barmode: stacked ? "stack" : "group", paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    font: { size: 11, color: colour("--soft") }, xaxis: { ...axis, showgrid: false }, yaxis: axis,
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--axis") },
  };
  Plotly.newPlot(plot, traces, layout, { displayModeBar: false, responsive: true });
  drawn.push(plot);
  plot.on("plotly_hover", (event) => elsewhere(plot, (other) => Plotly.Fx.hover(other, { xval: event.points[0].x })));
  plot.on("plotly_unhover", () => elsewhere(plot, (other) => Plotly.Fx.unhover(other)));
}

// What one chart makes others do comes back from them as events of their own.
function elsewhere(plot, act) {
  if (busy) return;
  busy = true;
  drawn.filter((other) => other !== plot && other.offsetParent).forEach(act);
  busy = false;
}

const seen = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => {
  seen.unobserve(entry.target);
  draw(entry.target);
}));
document.querySelectorAll("figure.chart").forEach((figure) => seen.observe(figure));
