// Live numbers: looks at the coordinator once a second, while somebody looks at the page.

import { fetchStatus } from "./api.js";
import { barChart, lineChart, stepParts } from "./charts.js";
import { find, make, showNumber } from "./dom.js";
import { History } from "./history.js";

const INTERVAL_MS = 1000;

const history = new History();

export async function startMonitor() {
  while (true) {
    if (!document.hidden) await look();
    await new Promise((resolve) => setTimeout(resolve, INTERVAL_MS));
  }
}

async function look() {
  try {
    const status = await fetchStatus();
    history.push(status);
    find("away").hidden = true;
    show(status);
  } catch (error) {
    const remedy = error.status === 401 ? "; enter an API key in the settings" : "";
    setBadge(find("health"), error.status === 401 ? "no API key" : "not reached", "bad");
    find("health").title = "";
    find("away").textContent = `No numbers: ${error.message}${remedy}`;
    find("away").hidden = false;
  }
  document.body.dataset.looks = String(Number(document.body.dataset.looks ?? 0) + 1);
}

function show(status) {
  find("model").textContent = status.model_id;
  const isWhole = status.is_ready && !status.reason;
  setBadge(find("health"), status.is_ready ? (isWhole ? "ready" : "ready, something is missing") : "not ready", isWhole ? "good" : status.is_ready ? "warn" : "bad");
  find("health").title = status.reason;
  showTiles(status);
  showAcceptance();
  showLines(status);
  const lanes = status.lanes.filter((lane) => lane.num_steps > 0);
  find("steps").replaceChildren(...(lanes.length ? lanes.map((lane) => stepParts(lane, lanes.length > 1)) : [empty("no step yet")]));
  find("canary").hidden = !status.variants.length;
  find("variants").replaceChildren(...status.variants.map(showVariant));
  find("lanes").replaceChildren(...(status.lanes.length ? status.lanes.map(showLane) : [empty("none is known")]));
  find("drafters").replaceChildren(...(status.drafters.length ? status.drafters.map(showDrafter) : [empty("none: tokens are decoded plainly")]));
}

function showTiles(status) {
  const { num_drafts: drafts, num_accepted_tokens: accepted } = status;
  const running = status.lanes.reduce((sum, lane) => sum + lane.num_running, 0);
  const tiles = {
    "tokens/s": showNumber(history.rates().at(-1) ?? 0, 0), "running": `${running}`, "waiting": `${status.num_waiting}`,
    "acceptance length": drafts ? showNumber(1 + accepted / drafts, 2) : "–",
  };
  find("tiles").replaceChildren(...Object.entries(tiles).map(([name, value]) => make("div", { class: "tile" }, make("b", {}, value), name)));
}

function showAcceptance() {
  const { shares, counts, span } = history.acceptance();
  find("acceptance-span").textContent = span;
  find("acceptance").replaceChildren(span ? barChart(shares, counts) : empty("no draft was verified yet"));
}

function showLines(status) {
  const isAdaptive = status.lanes.some((lane) => lane.policy.is_adaptive);
  const lines = isAdaptive ? [history.drafts(), history.budgets()] : [history.drafts()];
  find("k-title").textContent = isAdaptive ? "K, and verified drafts a step (dashed)" : `K: drafts a sequence and step, at most ${status.num_speculative_tokens}`;
  find("k").replaceChildren(lineChart(lines, history.seconds, `K now ${lines[0].at(-1) ?? "unknown"}`, 0));
  find("rate").replaceChildren(lineChart([history.rates()], history.seconds, "tokens per second", 0));
}

function showLane(lane) {
  const [word, kind] = lane.is_ready ? ["ready", "good"] : lane.is_draining ? ["draining", "warn"] : ["not ready", "bad"];
  const facts = [`${lane.num_running} running`, `${lane.num_steps} steps`, `K ${lane.num_speculative_tokens}`];
  if (lane.num_blocks) facts.push(`${lane.num_free_blocks} of ${lane.num_blocks} KV blocks free`);
  return peer(`lane ${lane.index}, ${lane.address}`, word, kind, [...facts, lane.policy.fallback, lane.reason]);
}

function showVariant(variant) {
  const length = variant.num_drafts ? `acceptance length ${showNumber(1 + variant.num_accepted_tokens / variant.num_drafts, 2)}` : "no drafts";
  const facts = [`K ${variant.schedule}`, `${variant.num_ended} ended`, length, `${showNumber(variant.token_ms, 2)} ms a token`];
  return peer(variant.name, `${showNumber(100 * variant.share)}%`, "good", facts);
}

function showDrafter(drafter) {
  const word = !drafter.is_connected ? "not connected" : drafter.is_draining ? "draining" : drafter.is_late ? "late" : "connected";
  const kind = !drafter.is_connected ? "bad" : word === "connected" ? "good" : "warn";
  const facts = [drafter.method, `${drafter.num_open} open`, `${drafter.num_draft_tokens} drafts`];
  if (drafter.reply_ms) facts.push(`replies in ${showNumber(drafter.reply_ms, 2)} ms`);
  if (drafter.num_timeouts) facts.push(`${drafter.num_timeouts} too late`);
  return peer(drafter.address, word, kind, facts);
}

function peer(name, word, kind, facts) {
  const badge = make("span", { class: "badge" });
  setBadge(badge, word, kind);
  return make("li", {}, name, badge, make("div", { class: "muted" }, facts.filter(Boolean).join(" · ")));
}

function setBadge(element, word, kind) {
  element.textContent = word;
  element.className = `badge ${kind}`;
}

function empty(words) {
  return make("div", { class: "empty" }, words);
}
