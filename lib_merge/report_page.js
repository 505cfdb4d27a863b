"use strict";
// The report's page: draws the heatmap and the bars, sorts and filters the table. Needs nothing from outside.

const data = JSON.parse(document.getElementById("data").textContent);
const CIVIDIS = [
  [0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115],
  [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56],
];
const FULL = 100; // rows that are shown at first

function shown(value) {
  return value === null ? "none" : String(value);
}

function colour(share) {
  const at = Math.min(1, Math.max(0, share)) * (CIVIDIS.length - 1);
  const low = Math.min(Math.floor(at), CIVIDIS.length - 2);
  const mixed = CIVIDIS[low].map((from, n) => Math.round(from + (CIVIDIS[low + 1][n] - from) * (at - low)));
  return `rgb(${mixed.join()})`;
}

function element(parent, name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

// Share of the way from the first to the last colour.
function place(quantity, value) {
  return quantity.high > quantity.low ? (value - quantity.low) / (quantity.high - quantity.low) : 1;
}

function drawSvg(chart, quantity) {
  const { blocks, kinds, counts } = data;
  const widest = (names) => Math.max(...names.map((name) => name.length));
  const left = Math.min(240, 16 + 7 * widest(kinds)), barsHigh = 70, top = barsHigh + 24 + 6 * widest(blocks);
  const wide = Math.max(20, Math.min(48, Math.floor((chart.clientWidth - left - 20) / blocks.length))), high = 17;
  const width = left + wide * blocks.length + 20, height = top + high * kinds.length + 50;
  const svg = element(chart, "svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  const most = Math.max(...quantity.bars.map((value) => Math.abs(value ?? 0))) || 1;
  element(svg, "text", { x: left - 8, y: barsHigh, "text-anchor": "end" }, "all kinds");
  blocks.forEach((block, n) => {
    const x = left + n * wide, value = quantity.bars[n], size = (barsHigh - 8) * Math.abs(value ?? 0) / most;
    const fill = colour(place(quantity, value ?? 0));
    const bar = element(svg, "rect", { x: x + 2, y: barsHigh - size, width: wide - 4, height: size, fill });
    bar.setAttribute("stroke", "currentColor");
    element(bar, "title", {}, `${block}: ${shown(value)}`);
    const middle = x + wide / 2 + 4, line = top - 6;
    element(svg, "text", { x: middle, y: line, transform: `rotate(-60 ${middle} ${line})` }, block);
  });
  kinds.forEach((kind, m) => {
    const y = top + m * high;
    const name = kind.length > 32 ? `${kind.slice(0, 31)}…` : kind;
    element(element(svg, "text", { x: left - 8, y: y + 12, "text-anchor": "end" }, name), "title", {}, kind);
    blocks.forEach((block, n) => {
      const value = quantity.cells[m][n], box = { x: left + n * wide, y, width: wide - 1, height: high - 1 };
      if (value === null) return void element(svg, "rect", { ...box, class: "none" });
      const cell = element(svg, "rect", { ...box, fill: colour(place(quantity, value)) });
      element(cell, "title", {}, `${kind}, ${block}: ${value} (${counts[m][n]} tensors)`);
    });
  });
  const scale = height - 34;
  for (let n = 0; n < 100; n++) {
    element(svg, "rect", { x: left + 2 * n, y: scale, width: 2.5, height: 12, fill: colour(n / 99) });
  }
  element(svg, "text", { x: left, y: height - 6 }, shown(quantity.low));
  element(svg, "text", { x: left + 200, y: height - 6, "text-anchor": "end" }, shown(quantity.high));
}

// Plotly reads a little HTML in its texts.
function plain(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function drawPlotly(chart, quantity) {
  const x = data.blocks.map(plain), y = data.kinds.map(plain);
  const style = getComputedStyle(document.body), grid = style.getPropertyValue("--line");
  const heat = {
    type: "heatmap", x, y, z: quantity.cells, customdata: data.counts, colorscale: "Cividis", xgap: 1, ygap: 1,
    zmin: quantity.low, zmax: quantity.high, hoverongaps: false, colorbar: { thickness: 14, outlinewidth: 0 },
    hovertemplate: "%{y}, %{x}<br>%{z} (%{customdata} tensors)<extra></extra>",
  };
  const bars = {
    type: "bar", x, y: quantity.bars, yaxis: "y2", hovertemplate: "%{x}: %{y}<extra></extra>",
    marker: {
      color: quantity.bars, colorscale: "Cividis", cmin: quantity.low, cmax: quantity.high,
      line: { color: style.color, width: 0.5 },
    },
  };
  const layout = {
    height: 260 + 18 * y.length, margin: { l: 10, r: 10, t: 34, b: 10 }, showlegend: false, bargap: 0.15,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: style.getPropertyValue("--none"), font: { color: style.color, size: 12 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: style.color, activecolor: style.color },
    xaxis: { type: "category", tickangle: -60, automargin: true, showgrid: false, anchor: "y" },
    yaxis: {
      type: "category", autorange: "reversed", automargin: true, dtick: 1, showgrid: false,
      domain: [0, 1 - 110 / (260 + 18 * y.length)],
    },
    yaxis2: {
      domain: [1 - 95 / (260 + 18 * y.length), 1], automargin: true, nticks: 4, gridcolor: grid, zerolinecolor: grid,
    },
  };
  const needed = 320 + 16 * x.length; // narrower windows scroll
  if (chart.clientWidth < needed) layout.width = needed;
  const buttons = [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]];
  Plotly.react(chart, [heat, bars], layout, { displaylogo: false, responsive: true, modeBarButtons: buttons });
}

function draw() {
  const quantity = data.quantities[document.getElementById("quantity").selectedIndex];
  const chart = document.getElementById("chart");
  const over = quantity.cells.flat().filter((value) => value !== null && value > quantity.high).length;
  const end = over ? ` The colours end at ${quantity.high}; ${over} cells are above.` : "";
  document.getElementById("meaning").textContent = quantity.meaning + "." + end;
  chart.setAttribute("aria-label", `${quantity.label} by layer kind and block; the table below holds the numbers`);
  if (window.Plotly) return drawPlotly(chart, quantity);
  chart.replaceChildren();
  return drawSvg(chart, quantity);
}

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const compare = new Intl.Collator(undefined, { numeric: true }).compare;
  heads.forEach((head, column) => {
    const number = head.classList.contains("n");
    head.querySelector("button").addEventListener("click", () => {
      const first = number ? "descending" : "ascending", other = number ? "ascending" : "descending";
      const order = head.getAttribute("aria-sort") === first ? other : first;
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const rows = [...body.rows].map((row) => {
        const text = row.cells[column].textContent;
        return [number && text ? Number(text) : text, row];
      });
      rows.sort(([a], [b]) => {
        if (a === "" || b === "") return (a === "") - (b === ""); // what is missing comes last in both orders
        return sign * (number ? a - b : compare(a, b));
      });
      body.append(...rows.map(([, row]) => row));
    });
  });
}

function filterable(table) {
  const rows = [...table.tBodies[0].rows], texts = rows.map((row) => row.textContent.toLowerCase());
  const box = document.getElementById("filter"), count = document.getElementById("count");
  const all = document.getElementById("all");
  const update = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let kept = 0;
    rows.forEach((row, n) => {
      row.hidden = !words.every((word) => texts[n].includes(word));
      kept += !row.hidden;
    });
    const few = !words.length && !all.checked && rows.length > FULL;
    table.classList.toggle("first", few);
    count.textContent = few ? `the first ${FULL} of ${rows.length}` : `${kept} of ${rows.length}`;
  };
  box.addEventListener("input", update);
  all.addEventListener("change", update);
  update();
}

const table = document.getElementById("rows");
table.addEventListener("mouseover", ({ target }) => {
  if (target.scope === "row") target.title = target.textContent; // long names are cut
});
sortable(table);
filterable(table);
if (data.quantities.length) {
  document.getElementById("quantity").addEventListener("change", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  if (!window.Plotly) addEventListener("resize", draw);
  draw();
}
