// The page: polls /debug/live and /debug/requests, keeps fixed-size rings, draws once per frame at most.

import { Refused, fetchedJson } from "./api.js";
import { fillLegend } from "./causes.js";
import { LineChart } from "./charts.js";
import { drawKv, drawSteps } from "./draw.js";
import { setUpPlayground } from "./playground.js";
import { RequestList, explain } from "./requests.js";

const $ = (id) => document.getElementById(id);
const ms = (value) => value == null ? "-" : value >= 10000 ? `${(value / 1000).toFixed(1)} s` : `${value.toFixed(value < 10 ? 1 : 0)} ms`;
const LIST_EVERY_MS = 1000;

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("firstlight-theme", theme);
}
setTheme(localStorage.getItem("firstlight-theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));

const percentiles = [["p50", "p95", "p99"], ["--decode", "--queue", "--machine"]];
const charts = {
  ttft: new LineChart($("chart-ttft"), ...percentiles),
  itl: new LineChart($("chart-itl"), ...percentiles),
  tokens: new LineChart($("chart-tokens"), ["tokens/s"], ["--prefill"]),
  requests: new LineChart($("chart-requests"), ["running", "waiting"], ["--decode", "--queue"]),
};
const list = new RequestList();
const playground = setUpPlayground(explain);
fillLegend($("causes-legend"));

let live = null, isDrawn = true, listedAt = 0;

function setState(state, text) {
  if ($("state").dataset.state !== state || $("state").textContent !== text) {
    $("state").dataset.state = state;
    $("state").textContent = text;
  }
}

function keep(next) {
  live = next;
  const now = next.now_unix_s;
  charts.ttft.push(now, [next.ttft_ms.p50, next.ttft_ms.p95, next.ttft_ms.p99]);
  charts.itl.push(now, [next.itl_ms.p50, next.itl_ms.p95, next.itl_ms.p99]);
  charts.tokens.push(now, [next.output_tokens_per_s]);
  charts.requests.push(now, [next.running, next.waiting]);
  if (isDrawn) {
    isDrawn = false;
    requestAnimationFrame(draw);
  }
}

export { keep, list }; // for the test that feeds an hour of updates

function draw() {
  isDrawn = true;
  $("model").textContent = live.model;
  for (const name of ["ttft", "itl"]) {
    for (const percent of ["p50", "p95", "p99"]) $(`${name}-${percent}`).textContent = ms(live[`${name}_ms`][percent]);
  }
  $("tokens-per-s").textContent = live.output_tokens_per_s.toFixed(1);
  for (const [id, value] of [["output-tokens", live.output_tokens], ["running", live.running], ["waiting", live.waiting], ["requests", live.requests]]) $(id).textContent = value;
  for (const owner of ["running", "cached", "pinned", "free"]) $(`kv-${owner}`).textContent = live.kv[owner];
  $("kv-note").textContent = live.kv.blocks_per_cell > 1 ? `each cell is ${live.kv.blocks_per_cell} blocks` : `${live.kv.blocks} blocks`;
  drawSteps($("steps"), live.steps);
  drawKv($("kv"), live.kv.map);
  const last = live.steps.at(-1);
  $("step-note").textContent = last ? `step ${last[0]}: ${last[2].toFixed(1)} ms, predicted ${last[3].toFixed(1)} ms; ${last[4]} prefill + ${last[5]} decode tokens` : "no step yet";
  for (const chart of Object.values(charts)) chart.draw();
}

async function poll() {
  const started = performance.now();
  try {
    keep(await fetchedJson("/debug/live"));
    if (started - listedAt >= LIST_EVERY_MS) {
      listedAt = started;
      await list.refresh();
    }
    setState("live", "live");
    $("key-form").hidden = true;
  } catch (error) {
    const wantsKey = error instanceof Refused && error.status === 401;
    $("key-form").hidden = !wantsKey;
    setState("gone", wantsKey ? "key needed" : error instanceof Refused ? error.message.slice(0, 40) : "no answer");
  }
  const every = document.hidden ? 5000 : Number($("rate").value);
  setTimeout(poll, Math.max(5, every - (performance.now() - started)));
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("firstlight-key", $("key").value);
  $("key").value = "";
});
$("by").addEventListener("change", () => { listedAt = 0; });
$("theme").addEventListener("click", () => {
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  for (const chart of Object.values(charts)) chart.make();
  if (live) draw();
  playground.redraw();
});
new ResizeObserver(() => {
  for (const chart of Object.values(charts)) chart.resize();
  if (live) { drawSteps($("steps"), live.steps); drawKv($("kv"), live.kv.map); }
  playground.redraw();
}).observe(document.querySelector("main"));
poll();
