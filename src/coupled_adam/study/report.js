"use strict";
// The plot of curves over training: pick a quantity and a size, point at a step or use the arrow keys.
(() => {
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.open = true; }));

  const data = document.getElementById("curves-data");
  if (!data) return;
  const plots = JSON.parse(data.textContent);
  const box = document.getElementById("curves"), readout = document.getElementById("readout");
  const pickQuantity = document.getElementById("quantity"), pickSize = document.getElementById("size");
  const H = 300, LEFT = 56, RIGHT = 14, TOP = 10, BOTTOM = 42;
  const DASHES = { "-": "", "--": "7 4", ":": "2 3" };
  let shown = null; // the plot, its scales, and the step that is read out

  const unique = (values) => [...new Set(values)];
  const fill = (select, names) => names.forEach((name) => select.add(new Option(name)));
  fill(pickQuantity, unique(plots.map((plot) => plot.quantity)));
  fill(pickSize, unique(plots.map((plot) => plot.size)));
  document.getElementById("size-label").hidden = pickSize.options.length < 2;

  const element = (name, attributes, parent, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    return parent.appendChild(made);
  };
  const ticks = (low, high) => {
    const span = high - low || 1, power = 10 ** Math.floor(Math.log10(span));
    const distance = [0.2, 0.5, 1, 2].map((f) => f * power).find((d) => span <= 5 * d);
    const found = [];
    for (let i = Math.ceil(low / distance - 1e-9); i * distance <= high + span * 1e-9; i++) found.push(i * distance);
    return found;
  };
  const written = (value) => String(Number(value.toPrecision(4)));

  function draw() {
    const plot = plots.find((p) => p.quantity === pickQuantity.value && p.size === pickSize.value);
    box.replaceChildren();
    readout.replaceChildren();
    shown = null;
    if (!plot) { readout.textContent = "Not measured here."; return; }
    const W = Math.max(320, Math.min(1100, box.clientWidth || 700));
    const all = plot.lines.flatMap((line) => line.low.concat(line.high));
    const xEnd = Math.max(...plot.lines.flatMap((line) => line.steps));
    let low = Math.min(...all), high = Math.max(...all);
    if (low > 0 && low < 0.5 * high) low = 0;
    const margin = (high - low || 1) * 0.04;
    high += margin;
    if (low !== 0) low -= margin;
    const x = (step) => LEFT + (step / xEnd) * (W - LEFT - RIGHT);
    const y = (value) => H - BOTTOM - ((value - low) / (high - low)) * (H - TOP - BOTTOM);
    const svg = element("svg", { viewBox: `0 0 ${W} ${H}` }, box);
    for (const tick of ticks(low, high)) {
      element("line", { class: "rule", x1: LEFT, x2: W - RIGHT, y1: y(tick), y2: y(tick) }, svg);
      element("text", { x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" }, svg, written(tick));
    }
    for (const tick of ticks(0, xEnd)) {
      element("text", { x: x(tick), y: H - BOTTOM + 18, "text-anchor": "middle" }, svg, written(tick));
    }
    element("text", { x: (LEFT + W - RIGHT) / 2, y: H - 4, "text-anchor": "middle" }, svg, "training step");
    for (const line of plot.lines) {
      const along = (values) => line.steps.map((step, i) => `${x(step).toFixed(1)},${y(values[i]).toFixed(1)}`);
      const band = along(line.high).concat(along(line.low).reverse()).join(" ");
      element("polygon", { points: band, fill: line.colour, "fill-opacity": 0.18 }, svg);
      element("polyline", { points: along(line.mean).join(" "), fill: "none", stroke: line.colour, "stroke-width": 2.2,
                            "stroke-dasharray": DASHES[line.line] || "" }, svg);
    }
    const rule = element("line", { class: "step", y1: TOP, y2: H - BOTTOM, visibility: "hidden" }, svg);
    const dots = plot.lines.map((line) => element("circle", { r: 4, fill: line.colour, visibility: "hidden" }, svg));
    shown = { plot, W, x, y, xEnd, rule, dots, step: xEnd };
    read(false);
  }

  // Values at the step, and the legend in one.
  function read(mark) {
    const { plot, x, y, rule, dots, step } = shown;
    const nearest = plot.lines.map((line) =>
      line.steps.reduce((best, s, i) => (Math.abs(s - step) < Math.abs(line.steps[best] - step) ? i : best), 0));
    const at = plot.lines[0].steps[nearest[0]];
    readout.replaceChildren();
    const label = document.createElement("span");
    label.textContent = `step ${written(at)}`;
    readout.append(label);
    plot.lines.forEach((line, number) => {
      const i = nearest[number], item = document.createElement("span"), key = document.createElement("span");
      key.className = "key";
      key.style.borderTopColor = line.colour;
      key.style.borderTopStyle = { "--": "dashed", ":": "dotted" }[line.line] || "solid";
      const range = line.low[i] === line.high[i] ? "" : ` (${written(line.low[i])} to ${written(line.high[i])})`;
      item.append(key, `${line.name} ${written(line.mean[i])}${range}`);
      readout.append(item);
      dots[number].setAttribute("cx", x(line.steps[i]));
      dots[number].setAttribute("cy", y(line.mean[i]));
      dots[number].setAttribute("visibility", mark ? "visible" : "hidden");
    });
    rule.setAttribute("x1", x(at));
    rule.setAttribute("x2", x(at));
    rule.setAttribute("visibility", mark ? "visible" : "hidden");
  }

  box.addEventListener("pointermove", (event) => {
    if (!shown) return;
    const bounds = box.getBoundingClientRect();
    const place = ((event.clientX - bounds.left) / bounds.width) * shown.W;
    shown.step = ((place - LEFT) / (shown.W - LEFT - RIGHT)) * shown.xEnd;
    read(true);
  });
  box.addEventListener("pointerleave", () => { if (shown) { shown.step = shown.xEnd; read(false); } });
  box.addEventListener("keydown", (event) => {
    if (!shown || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    event.preventDefault();
    const direction = event.key === "ArrowLeft" ? -1 : 1;
    shown.step = Math.min(shown.xEnd, Math.max(0, shown.step + (direction * shown.xEnd) / 50));
    read(true);
  });
  pickQuantity.addEventListener("change", draw);
  pickSize.addEventListener("change", draw);
  addEventListener("resize", draw);
  draw();
})();
