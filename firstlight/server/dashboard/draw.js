// Canvases: steps, KV map, gaps, one request's causes. Each draws from scratch and keeps nothing.

import { variableOf } from "./causes.js";

export const colour = (variable) => getComputedStyle(document.documentElement).getPropertyValue(variable).trim();

function prepared(canvas) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif";
  return [pen, width, height];
}

const STEP_SLOTS = 64;

// steps: [id, age_ms, ms, predicted_ms, prefill_tokens, decode_tokens, machine_ms]
export function drawSteps(canvas, steps) {
  const [pen, width, height] = prepared(canvas);
  const most = Math.max(1, ...steps.map((step) => Math.max(step[2], step[3])));
  const left = 38, slot = (width - left) / STEP_SLOTS, high = height - 14;
  pen.fillStyle = colour("--dim");
  pen.fillText(most.toFixed(most < 10 ? 1 : 0), 0, 10);
  pen.fillText("0", 0, high);
  pen.fillStyle = colour("--line");
  pen.fillRect(left, high, width - left, 1);
  steps.forEach((step, at) => {
    const [, , ms, predicted, prefill, decode, machine] = step;
    const x = left + (STEP_SLOTS - steps.length + at) * slot, size = Math.max(1, slot - 1);
    const own = Math.max(0, ms - machine);
    const parts = [["--decode", own * decode / Math.max(1, prefill + decode)], ["--prefill", own * prefill / Math.max(1, prefill + decode)], ["--machine", machine]];
    let y = high;
    for (const [variable, part] of parts) {
      const tall = part / most * (high - 4);
      pen.fillStyle = colour(variable);
      pen.fillRect(x, y - tall, size, tall);
      y -= tall;
    }
    pen.fillStyle = colour("--ink");
    pen.fillRect(x, high - predicted / most * (high - 4) - 1, size, 2);
  });
}

const OWNERS = { f: "--free", c: "--cached", r: "--decode", p: "--pinned" };

export function drawKv(canvas, map) {
  const [pen, width, height] = prepared(canvas);
  let size = Math.max(2, Math.floor(Math.sqrt(width * height / Math.max(1, map.length))));
  while (size > 2 && Math.ceil(map.length / Math.floor(width / size)) * size > height) size -= 1;
  const columns = Math.floor(width / size), gap = size > 4 ? 1 : 0;
  const colours = Object.fromEntries(Object.entries(OWNERS).map(([owner, variable]) => [owner, colour(variable)]));
  for (let at = 0; at < map.length; at += 1) {
    pen.fillStyle = colours[map[at]];
    pen.fillRect((at % columns) * size, Math.floor(at / columns) * size, size - gap, size - gap);
  }
}

// gaps: milliseconds before each piece, the first one the TTFT.
export function drawGaps(canvas, gaps) {
  const [pen, width, height] = prepared(canvas);
  const shown = gaps.slice(-Math.floor(width / 4)), most = Math.max(1, ...shown);
  const slot = Math.min(12, width / Math.max(1, shown.length));
  shown.forEach((gap, at) => {
    pen.fillStyle = colour(gaps.length === shown.length && at === 0 ? "--prefill" : "--decode");
    const tall = Math.max(1, gap / most * (height - 14));
    pen.fillRect(at * slot, height - tall, Math.max(1, slot - 1), tall);
  });
  pen.fillStyle = colour("--dim");
  pen.fillText(`${most.toFixed(0)} ms`, 2, 10);
}

export function drawSpans(canvas, spans, total) {
  const [pen, width, height] = prepared(canvas);
  for (const [cause, start, end] of spans) {
    pen.fillStyle = colour(variableOf(cause));
    pen.fillRect(start / total * width, 0, Math.max(0.5, (end - start) / total * width), height - 16);
  }
  pen.fillStyle = colour("--dim");
  pen.fillText("0", 0, height - 3);
  const label = `${total.toFixed(1)} ms`;
  pen.fillText(label, width - pen.measureText(label).width, height - 3);
}
