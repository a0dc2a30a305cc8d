// Line charts over the last minutes: rings of fixed size, so that an open page does not grow.

import { colour } from "./draw.js";

const POINTS = 600;

export class LineChart {
  constructor(element, names, variables) {
    this.element = element;
    this.names = names;
    this.variables = variables;
    this.times = new Float64Array(POINTS);
    this.rows = names.map(() => new Float64Array(POINTS));
    this.next = 0;
    this.size = 0;
    this.make();
  }

  make() {
    this.plot?.destroy();
    const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 }, font: "11px system-ui" };
    const series = this.names.map((label, at) => ({ label, stroke: colour(this.variables[at]), width: 1.5, points: { show: false }, value: (_, v) => v == null ? "-" : v.toFixed(1) }));
    this.plot = new uPlot({
      width: this.element.clientWidth, height: this.element.clientHeight - 26, series: [{}, ...series], cursor: { y: false },
      axes: [{ ...axis, space: 60 }, { ...axis, size: 52 }],
      scales: { y: { range: (_, low, high) => [0, Math.max(1, (high ?? 1) * 1.1)] } },
    }, this.data(), this.element);
  }

  push(time, values) {
    this.times[this.next] = time;
    values.forEach((value, at) => { this.rows[at][this.next] = value ?? NaN; });
    this.next = (this.next + 1) % POINTS;
    this.size = Math.min(POINTS, this.size + 1);
  }

  data() {
    const first = (this.next - this.size + POINTS) % POINTS;
    const ordered = (ring) => Array.from({ length: this.size }, (_, at) => ring[(first + at) % POINTS]);
    return [ordered(this.times), ...this.rows.map((ring) => ordered(ring).map((v) => Number.isNaN(v) ? null : v))];
  }

  draw() { this.plot.setData(this.data()); }

  resize() { this.plot.setSize({ width: this.element.clientWidth, height: this.element.clientHeight - 26 }); }
}
