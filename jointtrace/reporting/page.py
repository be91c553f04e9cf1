"""page: the HTML page of a memory timeline; `DATA` stands for the figures, as JSON."""

PAGE = r"""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Memory of one training step</title>
<style>
  body { font: 14px/1.45 system-ui, sans-serif; color: #222; background: #fff; margin: 24px auto; max-width: 1200px;
         padding: 0 16px; }
  h1 { font-size: 20px; margin: 0 0 4px; }
  h2 { font-size: 16px; margin: 24px 0 4px; }
  p { margin: 2px 0; }
  #legend { margin: 12px 0 0; display: flex; flex-wrap: wrap; gap: 4px 18px; }
  #legend span::before { content: ""; display: inline-block; width: 12px; height: 12px; margin-right: 6px;
                         background: var(--colour); vertical-align: -1px; }
  #chart { width: 100%; height: auto; display: block; outline-offset: 4px; }
  #chart text { font: 12px system-ui, sans-serif; fill: #222; }
  #tip { position: fixed; pointer-events: none; display: none; max-width: 520px; padding: 8px 10px; font-size: 13px;
         background: #fff; border: 1px solid #888; border-radius: 4px; box-shadow: 0 2px 8px #0003; }
  #tip td { padding: 0 8px 0 0; } #tip td + td { text-align: right; white-space: nowrap; }
  #tip b, #tip td { overflow-wrap: anywhere; }
  pre { white-space: pre-wrap; font: 12px/1.5 ui-monospace, monospace; margin: 4px 0; }
</style>
<h1>Memory of one training step</h1>
<div id="summary"></div>
<div id="legend"></div>
<svg id="chart" viewBox="0 0 1160 480" tabindex="0" role="img" aria-label="Bytes alive at each operation"></svg>
<p>Point at the chart, or focus it and use the arrow keys (Home: first, End: last, P: peak).</p>
<h2>Kept for the backward</h2>
<pre id="kept"></pre>
<div id="tip"></div>
<script type="application/json" id="data">DATA</script>
<script>
"use strict";
const d = JSON.parse(document.getElementById("data").textContent);
const chart = document.getElementById("chart"), tip = document.getElementById("tip");
const box = {left: 70, right: 1150, top: 52, bottom: 430}, n = Math.max(d.steps.length, 1);
const totals = d.steps.map(s => s[4].reduce((a, b) => a + b, 0));
const most = Math.max(...totals, 1) * 1.04;
const x = i => box.left + (box.right - box.left) * i / n;
const y = bytes => box.bottom - (box.bottom - box.top) * bytes / most;
function add(parent, tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}
function line(parent, text, tag = "p") {
  const node = document.createElement(tag);
  node.textContent = text;
  parent.append(node);
  return node;
}
function size(bytes) {
  if (bytes >= 2 ** 30) return (bytes / 2 ** 30).toFixed(2) + " GiB";
  if (bytes >= 2 ** 20 / 10) return (bytes / 2 ** 20).toFixed(2) + " MiB";
  return bytes >= 2 ** 10 ? (bytes / 2 ** 10).toFixed(1) + " KiB" : bytes + " B";
}
const point = (i, bytes) => `${x(i).toFixed(2)},${y(bytes).toFixed(2)}`;
function areas() {
  let floor = d.steps.map(() => 0);
  d.kinds.forEach((kind, k) => {
    const roof = floor.map((value, i) => value + d.steps[i][4][k]);
    const up = roof.map((value, i) => point(i, value) + " " + point(i + 1, value));
    const down = floor.map((value, i) => point(i + 1, value) + " " + point(i, value));
    add(chart, "polygon", {points: up.join(" ") + " " + down.reverse().join(" "), fill: d.colours[k]});
    floor = roof;
  });
}
function axes() {
  const raw = most / d.perUnit / 7, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find(m => m * power >= raw) * power;
  for (let value = 0; value * d.perUnit <= most; value += step) {
    const at = y(value * d.perUnit);
    add(chart, "line", {x1: box.left, x2: box.right, y1: at, y2: at, stroke: "#000", "stroke-opacity": 0.13});
    add(chart, "text", {x: box.left - 8, y: at + 4, "text-anchor": "end"}, +value.toPrecision(6));
  }
  add(chart, "text", {x: 16, y: (box.top + box.bottom) / 2, "text-anchor": "middle",
                      transform: `rotate(-90 16 ${(box.top + box.bottom) / 2})`}, "memory, " + d.unit);
  add(chart, "text", {x: (box.left + box.right) / 2, y: box.bottom + 34, "text-anchor": "middle"},
      "operations and kernels in the order they run");
  if (d.boundary > 0 && d.boundary < n)
    add(chart, "line", {x1: x(d.boundary), x2: x(d.boundary), y1: box.top - 6, y2: box.bottom, stroke: "#000",
                        "stroke-dasharray": "5 4"});
  for (const [name, from, to] of [["forward", 0, d.boundary], ["backward", d.boundary, n]])
    if (to > from) add(chart, "text", {x: (x(from) + x(to)) / 2, y: box.bottom + 16, "text-anchor": "middle"}, name);
}
function peak() {
  if (!d.steps.length) return;
  const at = x(d.peak + 0.5), top = y(totals[d.peak]), left = d.peak < n / 2;
  const bytes = totals[d.peak] - d.steps[d.peak][4][0];
  add(chart, "path", {d: `M${at} ${top} l-5 -9 h10 z`, fill: "#000"});
  add(chart, "line", {x1: at, x2: at, y1: 36, y2: top - 9, stroke: "#000"});
  const anchor = {x: at + (left ? 6 : -6), "text-anchor": left ? "start" : "end"};
  add(chart, "text", {...anchor, y: 14}, `peak ${size(bytes)} besides arguments`);
  add(chart, "text", {...anchor, y: 30}, d.steps[d.peak][1].slice(0, 90));
}
const cursor = () => chart.querySelector("#cursor") ||
  add(chart, "line", {id: "cursor", y1: box.top, y2: box.bottom, stroke: "#000", "pointer-events": "none"});
let current = d.peak;
function show(i, left, top) {
  current = Math.min(Math.max(i, 0), d.steps.length - 1);
  const [phase, op, source, region, bytes, largest] = d.steps[current], at = x(current + 0.5);
  cursor().setAttribute("x1", at);
  cursor().setAttribute("x2", at);
  tip.replaceChildren();
  line(tip, op, "b");
  const half = phase === "fw" ? "forward" : "backward";
  line(tip, `${half}, ${current + 1} of ${n}` + (region ? `, in ${region}` : ""), "div");
  if (source) line(tip, source, "div");
  const table = document.createElement("table");
  const row = (name, value, colour) => {
    const cells = table.insertRow(), first = cells.insertCell();
    first.textContent = name;
    if (colour) first.style.borderLeft = `10px solid ${colour}`, first.style.paddingLeft = "6px";
    cells.insertCell().textContent = size(value);
  };
  d.kinds.forEach((kind, k) => row(kind, bytes[k], d.colours[k]));
  row("all but the arguments", totals[current] - bytes[0]);
  tip.append(table);
  if (largest.length) line(tip, "largest tensors alive", "b");
  const list = document.createElement("table");
  for (const [name, value] of largest) {
    const cells = list.insertRow();
    cells.insertCell().textContent = d.names[name];
    cells.insertCell().textContent = size(value);
  }
  tip.append(list);
  tip.style.display = "block";
  const wide = tip.offsetWidth, high = tip.offsetHeight;
  tip.style.left = (left + 16 + wide > innerWidth ? Math.max(left - wide - 16, 4) : left + 16) + "px";
  tip.style.top = Math.max(Math.min(top + 16, innerHeight - high - 8), 4) + "px";
}
chart.addEventListener("mousemove", event => {
  const frame = chart.getBoundingClientRect(), across = (event.clientX - frame.left) * 1160 / frame.width;
  if (d.steps.length) show(Math.floor((across - box.left) * n / (box.right - box.left)), event.clientX, event.clientY);
});
chart.addEventListener("mouseleave", () => { tip.style.display = "none"; });
chart.addEventListener("keydown", event => {
  const to = {ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: n - 1, p: d.peak, P: d.peak}[event.key];
  if (to === undefined || !d.steps.length) return;
  event.preventDefault();
  const frame = chart.getBoundingClientRect();
  show(to, frame.left + x(current + 0.5) * frame.width / 1160, frame.top + 60);
});
d.summary.forEach(text => line(document.getElementById("summary"), text));
const legend = document.getElementById("legend");
d.kinds.forEach((kind, k) => line(legend, kind, "span").style.setProperty("--colour", d.colours[k]));
areas();
axes();
peak();
document.getElementById("kept").textContent = d.kept.join("\n") || "nothing";
</script>
</html>
"""
