// The colour of each cause, and bars made of them.

export const FAMILIES = [
  ["queue", "--queue", ["queue.step", "queue.order", "queue.capacity", "queue.rows", "queue.prefix", "queue.batch", "queue.rate_limit"]],
  ["KV memory", "--kv", ["queue.kv", "preempted", "load_kv"]],
  ["own prompt", "--prefill", ["prefill.own"]],
  ["others' prompts", "--chunks", ["prefill.others", "decode.chunks"]],
  ["own tokens", "--decode", ["decode.own"]],
  ["other streams", "--shared", ["decode.shared"]],
  ["machine", "--machine", ["machine"]],
  ["client", "--client", ["client_slow", "receive"]],
  ["text", "--text", ["parse", "template", "tokenise", "grammar", "submit", "detokenise", "flush"]],
];

const VARIABLE = new Map(FAMILIES.flatMap(([, variable, causes]) => causes.map((cause) => [cause, variable])));

export const variableOf = (cause) => VARIABLE.get(cause) ?? "--text";

export function fillLegend(element) {
  for (const [name, variable] of FAMILIES) {
    const swatch = document.createElement("i");
    swatch.style.background = `var(${variable})`;
    element.append(swatch, name);
  }
}

// A bar of runs [[cause, cells], ...].
export function bar(runs, share) {
  const element = document.createElement("div");
  element.className = "bar";
  element.style.width = `${Math.max(2, share * 100)}%`;
  for (const [cause, cells] of runs) {
    const piece = document.createElement("i");
    piece.style.flexGrow = cells;
    piece.style.background = `var(${variableOf(cause)})`;
    piece.title = cause;
    element.append(piece);
  }
  return element;
}
