// Small charts: bars by position, lines over time, parts of a step.

import { draw, make, showNumber } from "./dom.js";

const WIDTH = 380;
const PARTS = {
  plan_ms: ["plan", "plan and send"], propose_ms: ["propose", "wait for drafts"], verify_hop_ms: ["verify_hop", "to verifier and back"],
  verify_queue_ms: ["verify_queue", "wait at verifier"], forward_ms: ["forward", "target model"], commit_ms: ["commit", "commit, stream"],
};

// shares: null where there is no bar to show.
export function barChart(shares, counts) {
  const height = 110, top = 16, bottom = 92, slot = WIDTH / Math.max(shares.length, 4), width = Math.min(slot * 0.7, 46);
  const label = `Acceptance by position: ${shares.map((share) => (share === null ? "none" : `${Math.round(100 * share)}%`)).join(", ")}`;
  const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label });
  svg.append(draw("line", { class: "axis", x1: 0, x2: WIDTH, y1: bottom, y2: bottom }));
  for (const [index, share] of shares.entries()) {
    const middle = slot * (index + 0.5);
    svg.append(text(middle, height - 4, `${index}`));
    if (share === null) {
      svg.append(text(middle, bottom - 4, "–"));
      continue;
    }
    const size = (bottom - top) * share;
    const bar = draw("rect", { class: "bar", x: middle - width / 2, y: bottom - size, width, height: size, rx: 2 });
    bar.append(draw("title", {}, `position ${index}: ${showNumber(100 * share)}% of ${counts[index]} drafts`));
    svg.append(bar, text(middle, bottom - size - 4, slot < 26 ? `${Math.round(100 * share)}` : `${Math.round(100 * share)}%`));
  }
  return svg;
}

// Lines over the last seconds. lines: [[number or null, ...], ...], oldest first, of equal length.
export function lineChart(lines, seconds, label, digits) {
  const height = 86, top = 16, bottom = 68;
  const known = lines.flat().filter((value) => value !== null);
  const most = Math.max(1e-9, ...known);
  const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label });
  svg.append(draw("line", { class: "axis", x1: 0, x2: WIDTH, y1: bottom, y2: bottom }));
  for (const [number, line] of lines.entries()) {
    let path = "";
    for (const [index, value] of line.entries()) {
      if (value === null) continue;
      const x = (WIDTH * index) / Math.max(1, line.length - 1), y = bottom - ((bottom - top) * value) / most;
      path += `${path && line[index - 1] !== null ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    }
    if (path) svg.append(draw("path", { class: number ? "line second" : "line", d: path }));
  }
  const ends = [[0, top - 4, known.length ? showNumber(most, digits) : "", "start"], [0, height - 4, `${Math.round(seconds)} s ago`, "start"], [WIDTH, height - 4, "now", "end"]];
  for (const [x, y, words, anchor] of ends) svg.append(text(x, y, words, anchor));
  return svg;
}

export function stepParts(lane, hasSeveral) {
  const times = lane.times;
  const title = make("div", { class: "muted" }, `${hasSeveral ? `lane ${lane.index}: ` : ""}${showNumber(times.step_ms, 2)} ms a step`);
  const bars = make("div", { class: "bars", role: "img", "aria-label": `step of lane ${lane.index}: ${showNumber(times.step_ms, 2)} ms` });
  const table = make("div", { class: "parts" });
  const total = Object.keys(PARTS).reduce((sum, name) => sum + times[name], 0);
  for (const [name, [style, words]] of Object.entries(PARTS)) {
    const bar = make("div", { class: style, title: `${words}: ${showNumber(times[name], 2)} ms` });
    bar.style.width = `${total ? (100 * times[name]) / total : 0}%`;
    bars.append(bar);
    table.append(make("span", {}, make("i", { class: `swatch ${style}` }), words, make("b", {}, `${showNumber(times[name], 2)} ms`)));
  }
  return make("div", { class: "step" }, title, bars, table);
}

function text(x, y, words, anchor = "middle") {
  return draw("text", { x, y, "text-anchor": anchor }, words);
}
