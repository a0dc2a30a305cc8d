// The list of finished requests, and the panel that explains one.

import { fetchedJson } from "./api.js";
import { bar, variableOf } from "./causes.js";
import { drawSpans } from "./draw.js";

const $ = (id) => document.getElementById(id);
const ms = (value) => value == null ? "-" : value >= 10000 ? `${(value / 1000).toFixed(1)} s` : `${value.toFixed(value < 10 ? 1 : 0)} ms`;

function cell(content, isNumber = false) {
  const element = document.createElement("td");
  element.append(content);
  if (isNumber) element.className = "num";
  return element;
}

function row(view, longest) {
  const element = document.createElement("tr");
  element.tabIndex = 0;
  element.dataset.id = view.id;
  element.title = view.verdict.sentence;
  element.append(
    cell(view.request_id), cell(ms(view.ttft_ms), true), cell(ms(view.e2e_ms), true), cell(`${view.prompt_tokens} + ${view.output_tokens}`, true),
    cell(bar(view.bar, view.e2e_ms / longest)),
  );
  return element;
}

export class RequestList {
  constructor() {
    this.shown = "";
    this.body = $("list").tBodies[0];
    this.body.addEventListener("click", (event) => explain(event.target.closest("tr")?.dataset.id));
    this.body.addEventListener("keydown", (event) => {
      const at = event.target.closest("tr");
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); explain(at.dataset.id); }
      if (event.key === "ArrowDown") { event.preventDefault(); at.nextElementSibling?.focus(); }
      if (event.key === "ArrowUp") { event.preventDefault(); at.previousElementSibling?.focus(); }
    });
  }

  async refresh() {
    const { requests } = await fetchedJson(`/debug/requests?num=40&by=${$("by").value}`);
    const key = requests.map((view) => view.id).join();
    if (key === this.shown) return;
    this.shown = key;
    const focused = document.activeElement?.dataset?.id;
    const longest = Math.max(1, ...requests.map((view) => view.e2e_ms));
    this.body.replaceChildren(...requests.map((view) => row(view, longest)));
    if (focused) this.body.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
  }
}

export async function explain(id) {
  if (!id) return;
  let view;
  for (let tries = 0; ; tries += 1) {
    try { view = await fetchedJson(`/debug/requests/${encodeURIComponent(id)}`); break; } catch (error) {
      if (tries >= 4) { $("detail-title").textContent = error.message; $("detail-rows").replaceChildren(); $("detail").showModal(); return; }
      await new Promise((wake) => setTimeout(wake, 150));
    }
  }
  $("detail-title").textContent = view.request_id;
  $("detail-facts").textContent = `${view.id}: ${view.status} ${view.finish}, ${view.prompt_tokens} prompt tokens (${view.cached_tokens} cached), ${view.output_tokens} out; first token ${ms(view.ttft_ms)}, longest gap ${ms(view.longest_gap_ms)}, E2E ${ms(view.e2e_ms)}${view.delivery_ms ? `, the client took it ${ms(view.delivery_ms)} later` : ""}`;
  $("detail-verdict").textContent = `${view.verdict.cause}: ${view.verdict.sentence}`;
  $("detail-change").textContent = `To change: ${view.verdict.change}`;
  const rows = Object.entries(view.totals_ms).sort((a, b) => b[1] - a[1]).map(([cause, value]) => {
    const name = document.createElement("span"), swatch = document.createElement("i"), element = document.createElement("tr");
    swatch.className = "swatch";
    swatch.style.background = `var(${variableOf(cause)})`;
    name.append(swatch, cause);
    const of = (totals) => totals[cause] == null ? "" : totals[cause].toFixed(1);
    element.append(cell(name), cell(value.toFixed(1), true), cell(`${(value / view.e2e_ms * 100).toFixed(0)} %`, true), cell(of(view.ttft_totals_ms), true), cell(of(view.gap_totals_ms), true));
    return element;
  });
  $("detail-rows").replaceChildren(...rows);
  const beside = view.beside.map((other) => {
    const element = document.createElement("li");
    element.textContent = `${other.id}: ${other.prefill_tokens} prompt tokens, ${other.decode_tokens} output tokens in ${other.steps} steps`;
    return element;
  });
  $("detail-beside").replaceChildren(...(beside.length ? beside : [Object.assign(document.createElement("li"), { textContent: "nothing" })]));
  if (!$("detail").open) $("detail").showModal();
  drawSpans($("detail-bar"), view.spans, view.e2e_ms);
}
