// Streams one chat and times every piece as this page receives it.

import { fetched } from "./api.js";
import { drawGaps } from "./draw.js";

const $ = (id) => document.getElementById(id);
const shown = (ms) => ms == null ? "-" : `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
const median = (values) => values.length ? [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)] : null;

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

export function setUpPlayground(explain) {
  let stop = null, answerId = null, gaps = [];
  const figures = () => {
    $("play-ttft").textContent = shown(gaps[0]);
    $("play-gap").textContent = shown(median(gaps.slice(1)));
    $("play-longest").textContent = shown(gaps.length > 1 ? Math.max(...gaps.slice(1)) : null);
    $("play-count").textContent = gaps.length;
    drawGaps($("gaps"), gaps);
  };

  async function send() {
    stop = new AbortController();
    $("send").disabled = true;
    $("stop").disabled = false;
    $("play-explain").disabled = true;
    $("answer").textContent = "";
    gaps = [];
    answerId = null;
    let last = performance.now();
    try {
      const body = { messages: [{ role: "user", content: $("prompt").value }], stream: true, max_tokens: Number($("play-tokens").value) };
      const answer = await fetched("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" }, signal: stop.signal });
      for await (const event of events(answer)) {
        if (event.error) throw new Error(event.error.message);
        answerId = event.id;
        const text = event.choices[0]?.delta?.content;
        if (!text) continue;
        const now = performance.now();
        gaps.push(now - last);
        last = now;
        $("answer").append(text);
        $("answer").scrollTop = $("answer").scrollHeight;
        figures();
      }
    } catch (error) {
      if (error.name !== "AbortError") $("answer").append(`\n[${error.message}]`);
    } finally {
      figures();
      $("send").disabled = false;
      $("stop").disabled = true;
      $("play-explain").disabled = answerId === null;
    }
  }

  $("play").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !$("send").disabled) { event.preventDefault(); send(); }
  });
  $("stop").addEventListener("click", () => stop?.abort());
  $("play-explain").addEventListener("click", () => explain(answerId));
  return { redraw: () => drawGaps($("gaps"), gaps) };
}
