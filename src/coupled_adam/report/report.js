"use strict";
// Two interactive plots. Without this script the page shows the same data as static pictures.
const read = (id) => { const data = document.getElementById(id); return data && JSON.parse(data.textContent); };
const make = (name, parent, text, type) => {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (type) made.className = type;
  return parent.appendChild(made);
};

addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.open = true; }));

// Curves over training: all quantities of one size, read at one step.
(() => {
  const plots = read("curves-data");
  if (!plots) return;
  document.getElementById("curves-section").classList.add("scripted");
  const box = document.getElementById("curves"), readout = document.getElementById("readout");
  const legend = document.getElementById("legend"), pickSize = document.getElementById("size");
  const note = document.getElementById("curves-note"); // fills the place after the last chart
  const LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 24, HEIGHT = 190;
  const DASHES = { "-": "", "--": "7 4", "-.": "7 3 2 3", ":": "2 3" };
  const MOST_BESIDE = 4; // values in the title of a chart; those of more curves are in the legend
  let charts = [], end = 1, step = 1;

  [...new Set(plots.map((plot) => plot.size))].forEach((size) => pickSize.add(new Option(size)));
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
  const measured = (plot, value) =>
    (plot.decimals === null ? written(value) : value.toFixed(plot.decimals)).replace(/^-/, "−");
  const whole = (value) => Math.round(value).toLocaleString("en-US");

  function draw() {
    const shown = plots.filter((plot) => plot.size === pickSize.value);
    end = Math.max(...shown.flatMap((plot) => plot.lines.flatMap((line) => line.steps)));
    step = end;
    box.replaceChildren();
    legend.replaceChildren();
    const named = new Map(shown.flatMap((plot) => plot.lines).map((line) => [line.name, line]));
    const cells = named.size > MOST_BESIDE ? listed(named, shown) : null;
    if (!cells) {
      for (const line of named.values()) addKey(make("span", legend), line);
      legend.parentNode.append(readout);
    }
    // Create the boxes first: their width decides how many fit side by side.
    const parts = shown.map((plot) => {
      const part = make("div", box, undefined, "curve"), title = make("h3", part, plot.quantity);
      return { plot, part, at: make("span", title, "", "at"), cells: cells && cells.get(plot) };
    });
    box.append(note);
    charts = parts.map(drawOne);
    mark(false);
  }

  function addKey(item, line) {
    const key = element("svg", { class: "line", viewBox: "0 0 28 8" }, item);
    element("line", { x1: 0, x2: 28, y1: 4, y2: 4, stroke: line.colour, "stroke-width": 3,
                      "stroke-dasharray": DASHES[line.line] || "" }, key);
    item.append(line.name);
  }

  // The legend of many curves: a table with a row per optimizer and a column per chart. Return the cells of each chart by
  // the optimizer's name. A row under the pointer fades the other curves.
  function listed(named, shown) {
    const table = make("table", legend), head = make("tr", make("thead", table)), body = make("tbody", table);
    make("td", head).append(readout);
    const cells = new Map(shown.map((plot) => [plot, new Map()]));
    for (const plot of shown) make("th", head, plot.quantity).scope = "col";
    for (const line of named.values()) {
      const row = make("tr", body), heading = make("th", row);
      heading.scope = "row";
      addKey(heading, line);
      for (const plot of shown) cells.get(plot).set(line.name, make("td", row, ""));
      row.addEventListener("pointerenter", () => fade((name) => name !== line.name));
      row.addEventListener("pointerleave", () => fade(() => false));
    }
    return cells;
  }

  function fade(isAside) {
    for (const { plot, shapes } of charts) {
      plot.lines.forEach((line, number) =>
        shapes[number].forEach((shape) => shape.classList.toggle("aside", isAside(line.name))));
    }
  }

  function drawOne({ plot, part, at, cells }) {
    const isMany = plot.lines.length > MOST_BESIDE; // thin lines and faint bands
    const W = Math.max(260, part.clientWidth), H = HEIGHT;
    const all = plot.lines.flatMap((line) => line.low.concat(line.high));
    let low = Math.min(...all), high = Math.max(...all);
    if (low > 0 && low < 0.5 * high) low = 0;
    const margin = (high - low || 1) * 0.06;
    high += margin;
    if (low !== 0) low -= margin;
    const x = (s) => LEFT + (s / end) * (W - LEFT - RIGHT);
    const y = (value) => H - BOTTOM - ((value - low) / (high - low)) * (H - TOP - BOTTOM);
    const svg = element("svg", { viewBox: `0 0 ${W} ${H}` }, part);
    for (const tick of ticks(low, high)) {
      element("line", { class: "rule", x1: LEFT, x2: W - RIGHT, y1: y(tick), y2: y(tick) }, svg);
      element("text", { x: LEFT - 7, y: y(tick) + 4, "text-anchor": "end" }, svg, written(tick).replace(/^-/, "−"));
    }
    const along = ticks(0, end);
    for (const tick of along) {
      const last = tick === along[along.length - 1];
      element("text", { x: last ? Math.min(x(tick), W - RIGHT) : x(tick), y: H - 6,
                        "text-anchor": last && x(tick) > W - RIGHT - 20 ? "end" : "middle" }, svg,
              tick === 0 ? "step 0" : whole(tick));
    }
    const shapes = plot.lines.map((line) => {
      const path = (values) => line.steps.map((s, i) => `${x(s).toFixed(1)},${y(values[i]).toFixed(1)}`);
      const band = path(line.high).concat(path(line.low).reverse()).join(" ");
      return [
        element("polygon", { points: band, fill: line.colour, "fill-opacity": isMany ? 0.06 : 0.18 }, svg),
        element("polyline", { points: path(line.mean).join(" "), fill: "none", stroke: line.colour,
                              "stroke-width": isMany ? 1.6 : 2.2,
                              "stroke-dasharray": DASHES[line.line] || "" }, svg),
      ];
    });
    const rule = element("line", { class: "step", y1: TOP, y2: H - BOTTOM, visibility: "hidden" }, svg);
    const dots = plot.lines.map((line) => element("circle", { r: 4, fill: line.colour, visibility: "hidden" }, svg));
    svg.addEventListener("pointermove", (event) => {
      const bounds = svg.getBoundingClientRect(), place = ((event.clientX - bounds.left) / bounds.width) * W;
      step = Math.min(end, Math.max(0, ((place - LEFT) / (W - LEFT - RIGHT)) * end));
      mark(true);
    });
    return { plot, at, cells, x, y, rule, dots, shapes };
  }

  // Show the values of every chart at the current step.
  function mark(visible) {
    let exact = step;
    for (const { plot, at, cells, x, y, rule, dots } of charts) {
      at.replaceChildren();
      plot.lines.forEach((line, number) => {
        const i = line.steps.reduce((best, s, k) =>
          (Math.abs(s - step) < Math.abs(line.steps[best] - step) ? k : best), 0);
        const value = cells ? cells.get(line.name) : make("span", at);
        value.textContent = measured(plot, line.mean[i]);
        if (!cells) value.style.color = line.colour;
        value.title = line.low[i] === line.high[i] ? line.name
          : `${line.name}: ${measured(plot, line.low[i])} to ${measured(plot, line.high[i])}`;
        dots[number].setAttribute("cx", x(line.steps[i]));
        dots[number].setAttribute("cy", y(line.mean[i]));
        dots[number].setAttribute("visibility", visible ? "visible" : "hidden");
        if (plot === charts[0].plot && number === 0) exact = line.steps[i];
        if (number === 0) {
          rule.setAttribute("x1", x(line.steps[i]));
          rule.setAttribute("x2", x(line.steps[i]));
        }
      });
      rule.setAttribute("visibility", visible ? "visible" : "hidden");
    }
    readout.textContent = `at step ${whole(exact)}`;
  }

  box.addEventListener("pointerleave", () => { step = end; mark(false); });
  box.addEventListener("keydown", (event) => {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    event.preventDefault();
    step = Math.min(end, Math.max(0, step + ((event.key === "ArrowLeft" ? -1 : 1) * end) / 50));
    mark(true);
  });
  pickSize.addEventListener("change", draw);
  addEventListener("resize", draw);
  draw();
})();

// The embeddings around the origin: drag to rotate all clouds, or animate the tokens from before to after training.
(() => {
  const data = read("clouds-data"), box = document.getElementById("clouds");
  if (!data || !box) return;
  box.closest("figure").classList.add("scripted");
  const [left, bottom, right, top] = data.window, middle = [(left + right) / 2, (bottom + top) / 2, 0];
  let yaw = 0, pitch = 0, done = 1, held = null;
  const views = make("div", box, undefined, "views");
  const shown = data.clouds.map((cloud) => {
    const view = make("div", views, undefined, "view");
    make("p", view, cloud.name).style.color = cloud.colour;
    const canvas = make("canvas", view);
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `Embeddings of ${cloud.name}; use the arrow keys to rotate`);
    return { cloud, canvas };
  });
  const below = make("p", box, undefined, "turning");
  const play = make("button", below, "▶ Animate training");
  const reset = make("button", below, "Side view");
  play.type = reset.type = "button";
  make("span", below, "Drag to rotate. Grey: before training. +: origin. ×: mean.");

  function draw() {
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--text"), faint = style.getPropertyValue("--faint");
    const line = style.getPropertyValue("--line");
    const [c, s, d, t] = [Math.cos(yaw), Math.sin(yaw), Math.cos(pitch), Math.sin(pitch)];
    for (const { cloud, canvas } of shown) {
      const W = canvas.clientWidth || 300, H = Math.round(W * Math.max(0.9, Math.min(1, (top - bottom) / (right - left))));
      const ratio = window.devicePixelRatio || 1;
      canvas.style.height = `${H}px`;
      canvas.width = W * ratio;
      canvas.height = H * ratio;
      const pen = canvas.getContext("2d"), scale = Math.min(W / (right - left), H / (top - bottom));
      pen.scale(ratio, ratio);
      const place = (x, y, z) => {
        const [px, py] = [x - middle[0], y - middle[1]];
        const across = px * c + z * s, depth = z * c - px * s;
        return [W / 2 + scale * across, H / 2 - scale * (py * d - depth * t)];
      };
      const stroke = (from, to, colour, width) => {
        pen.strokeStyle = colour;
        pen.lineWidth = width;
        pen.beginPath();
        pen.moveTo(...from);
        pen.lineTo(...to);
        pen.stroke();
      };
      const far = 4 * data.units;
      for (const axis of [[far, 0, 0], [0, far, 0], [0, 0, far]]) {
        stroke(place(...axis.map((v) => -v)), place(...axis), line, 1);
      }
      const points = (at, colour) => {
        pen.fillStyle = colour;
        pen.globalAlpha = 0.5;
        for (let i = 0; i < cloud.after.length; i += 3) {
          const [x, y] = place(...at(i));
          pen.beginPath();
          pen.arc(x, y, 1.9, 0, 7);
          pen.fill();
        }
        pen.globalAlpha = 1;
      };
      const { before, after } = cloud;
      points((i) => [0, 1, 2].map((k) => before[i + k] + done * (after[i + k] - before[i + k])), cloud.colour);
      points((i) => [before[i], before[i + 1], before[i + 2]], faint);
      const [ox, oy] = place(0, 0, 0), [mx, my] = place(...cloud.mean.map((v) => v * done));
      stroke([ox - 9, oy], [ox + 9, oy], ink, 2.2);
      stroke([ox, oy - 9], [ox, oy + 9], ink, 2.2);
      stroke([mx - 5, my - 5], [mx + 5, my + 5], ink, 2.2);
      stroke([mx - 5, my + 5], [mx + 5, my - 5], ink, 2.2);
    }
  }

  const turn = (right_, up) => {
    yaw += right_;
    pitch = Math.max(-1.5, Math.min(1.5, pitch + up));
    draw();
  };
  for (const { canvas } of shown) {
    canvas.addEventListener("pointerdown", (event) => {
      held = [event.clientX, event.clientY];
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!held) return;
      turn((event.clientX - held[0]) / 120, (event.clientY - held[1]) / 120);
      held = [event.clientX, event.clientY];
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { held = null; });
    canvas.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: [-0.1, 0], ArrowRight: [0.1, 0], ArrowUp: [0, -0.1], ArrowDown: [0, 0.1] }[event.key];
      if (!by) return;
      event.preventDefault();
      turn(...by);
    });
  }
  reset.addEventListener("click", () => { yaw = pitch = 0; draw(); });
  play.addEventListener("click", () => {
    const length = matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : 1600;
    let start = null;
    const move = (now) => {
      start = start === null ? now : start;
      const part = length ? Math.min(1, (now - start) / length) : 1;
      done = part * part * (3 - 2 * part);
      draw();
      if (part < 1) requestAnimationFrame(move);
    };
    requestAnimationFrame(move);
  });
  addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
