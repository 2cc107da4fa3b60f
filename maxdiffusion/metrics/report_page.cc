#include "maxdiffusion/metrics/report_page.h"

namespace md {

const char* const kReportPage = R"html(<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Training runs</title>
<style>
:root {
  color-scheme: light dark;
  --back: #f6f7f9; --card: #ffffff; --text: #1c2128; --faint: #667080; --line: #dfe3e8; --mark: #fff3c4;
}
@media (prefers-color-scheme: dark) {
  :root { --back: #14171c; --card: #1d2128; --text: #e4e8ee; --faint: #98a2b0; --line: #343b46; --mark: #4a4120; }
}
* { box-sizing: border-box; }
body { margin: 0; padding: 1rem 1.25rem 3rem; background: var(--back); color: var(--text);
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main, header { max-width: 1500px; margin: 0 auto; }
h1 { font-size: 1.35rem; margin: 0 0 .5rem; }
h2 { font-size: 1.1rem; margin: 1.75rem 0 .6rem; }
h3 { font-size: .95rem; margin: 0; font-weight: 600; }
h3 small, .faint { color: var(--faint); font-weight: 400; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .7rem .8rem; min-width: 0; }
.bar { position: sticky; top: 0; z-index: 2; display: flex; flex-wrap: wrap; gap: .4rem 1.2rem; align-items: center;
  margin-bottom: .8rem; }
.bar label { display: inline-flex; gap: .4rem; align-items: center; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem .9rem; }
.legend i, .tip i { display: inline-block; width: .8rem; height: .8rem; border-radius: 3px; flex: none; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(440px, 100%), 1fr)); gap: .8rem; }
.head { display: flex; justify-content: space-between; gap: .5rem; align-items: baseline; }
.head label { color: var(--faint); font-size: .8rem; white-space: nowrap; }
svg { display: block; width: 100%; height: 250px; touch-action: pan-y; cursor: crosshair; user-select: none; }
svg text { fill: var(--faint); font-size: 11px; }
.grid { stroke: var(--line); stroke-width: 1; shape-rendering: crispEdges; }
.rule { stroke: var(--faint); stroke-width: 1; stroke-dasharray: 3 3; }
.window { fill: var(--faint); opacity: .2; }
.tip { position: fixed; z-index: 3; pointer-events: none; padding: .4rem .6rem; font-size: 12px; max-width: 28rem;
  box-shadow: 0 2px 10px rgba(0, 0, 0, .25); }
.tip table td { border: 0; padding: 0 .35rem 0 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { overflow-wrap: anywhere; max-width: 40rem; }
tr.differs td { background: var(--mark); }
th.run { white-space: nowrap; }
.notes { margin: .5rem 0 0; padding-left: 1.2rem; }
.samples { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(360px, 100%), 1fr)); gap: .8rem; }
.samples img, .samples video { display: block; max-width: 100%; max-height: 80vh; margin-top: .4rem; background: #fff; }
input[type=range] { accent-color: #0072b2; }
.slider { display: flex; gap: .8rem; align-items: center; margin-bottom: .8rem; }
.slider input { flex: 1; }
input[type=search] { padding: .2rem .5rem; font: inherit; min-width: 14rem; }
</style>
</head>
<body>
<header><h1>Training runs</h1></header>
<main></main>
<script id="data" type="application/json">@DATA@</script>
<script>
'use strict';
const {version, runs, live} = JSON.parse(document.getElementById('data').textContent);
// Colours that differ with colour blindness too, readable on light and dark.
const PALETTE = ['#2a86cf', '#e07b00', '#009e73', '#cc4c9a', '#8f6bd6', '#b8860b', '#4aa8d8', '#d1495b'];
runs.forEach((run, i) => { run.color = PALETTE[i % PALETTE.length]; run.dash = i < PALETTE.length ? '' : '6 3'; run.shown = true; });

const main = document.querySelector('main');
function make(tag, attributes = {}, ...children) {
  const e = document.createElement(tag);
  for (const [k, v] of Object.entries(attributes)) k in e && k !== 'list' ? e[k] = v : e.setAttribute(k, v);
  e.append(...children);
  return e;
}
function svg_element(tag, attributes, parent) {
  const e = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
  if (parent) parent.append(e);
  return e;
}
function shown(v) {
  if (v === null || v === undefined || !isFinite(v)) return '–';
  if (v === 0) return '0';
  const a = Math.abs(v);
  if (Number.isInteger(v) && a < 1e7) return v.toLocaleString('en');
  return a >= 1e6 || a < 1e-4 ? v.toExponential(3).replace(/\.?0+e/, 'e') : String(+v.toPrecision(5));
}
function duration(s) {
  if (!isFinite(s)) return '–';
  s = Math.round(s);
  const two = n => String(n).padStart(2, '0');
  return s < 3600 ? `${Math.floor(s / 60)}:${two(s % 60)}` : `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
}
const last = all => { for (let i = (all || []).length - 1; i >= 0; --i) if (all[i] !== null) return all[i]; return null; };
const least = all => (all || []).reduce((m, v) => v !== null && (m === null || v < m) ? v : m, null);
const most = all => (all || []).reduce((m, v) => v !== null && (m === null || v > m) ? v : m, null);
const sum = all => (all || []).reduce((s, v) => s + (v || 0), 0);

// --- Curves -----------------------------------------------------------------------------------------------------------
const longest = Math.max(1, ...runs.map(r => r.steps.length));
const view = {smooth: Math.max(0, Math.min(0.998, 1 - 50 / Math.max(50, longest))), x: 'step', zoom: null};
/** The mean of exponentially fading weights, without the lag of its start; gaps stay gaps. */
function smoothed(values) {
  const w = view.smooth;
  let m = 0, n = 0;
  return values.map(v => {
    if (v === null) return null;
    m = w * m + (1 - w) * v;
    n = w * n + (1 - w);
    return m / n;
  });
}
function begin(run) {
  if (run.starts.length) return +run.starts[0].time;
  const t = run.metrics.time, s = run.metrics.step_time_seconds;
  return t && t.length ? t[0] - ((s && s[0]) || 0) : null;
}
function xs(run) {
  if (view.x === 'step') return run.steps;
  const t0 = begin(run);
  return (run.metrics.time || []).map(t => t === null ? null : (t - t0) / 3600);
}
const GIB = 2 ** 30;
const CHARTS = [
  {of: 'loss', title: 'Loss', smooth: true},
  {of: 'eval_loss', title: 'Held-out loss', marks: true},
  {by_time: true, title: 'Held-out loss by timestep, last evaluation', marks: true, x_title: 'timestep'},
  {of: 'learning_rate', title: 'Learning rate'},
  {of: 'grad_norm', title: 'Gradient norm', smooth: true},
  {of: 'samples_per_second', title: 'Throughput', unit: 'samples/s', smooth: true},
  {of: 'step_time_seconds', title: 'Step time', unit: 's', smooth: true},
  {of: 'per_device_tflops_per_sec', title: 'Work of a device', unit: 'TFLOP/s', smooth: true},
  {of: 'mfu', title: 'Of the device’s peak', unit: '%', scale: 100, smooth: true},
  {of: 'goodput', title: 'Goodput', unit: '% of the time since the start', scale: 100},
  {of: 'host_memory_bytes', title: 'Memory of the host', unit: 'GiB', scale: 1 / GIB, zero: true},
  {of: 'device_peak_memory_bytes', title: 'Memory of a device, peak', unit: 'GiB', scale: 1 / GIB, zero: true},
];
const names = [...new Set(runs.flatMap(r => Object.keys(r.metrics)))].sort();
const known = new Set([...CHARTS.map(c => c.of), 'time', 'per_device_tflops']);
for (const name of names)
  if (!known.has(name) && !/^eval_loss_timestep_/.test(name)) CHARTS.push({of: name, title: name, smooth: true});

/** What a chart shows: of each run shown its places, values, and smoothed values or null. */
function series(chart) {
  return runs.filter(r => r.shown).map(run => {
    if (chart.by_time) {
      const points = Object.entries(run.metrics).map(([name, v]) => [/^eval_loss_timestep_(\d+)$/.exec(name), last(v)])
        .filter(([m, v]) => m && v !== null).map(([m, v]) => [+m[1], v]).sort((a, b) => a[0] - b[0]);
      return {run, x: points.map(p => p[0]), y: points.map(p => p[1]), smooth: null};
    }
    const raw = run.metrics[chart.of];
    if (!raw) return {run, x: [], y: [], smooth: null};
    const y = chart.scale ? raw.map(v => v === null ? null : v * chart.scale) : raw;
    return {run, x: xs(run), y, smooth: chart.smooth && view.smooth > 0 ? smoothed(y) : null};
  });
}
function ticks(low, high, about) {
  const raw = (high - low) / about, p = 10 ** Math.floor(Math.log10(raw));
  const step = p * [1, 2, 5, 10].find(k => p * k >= raw);
  const all = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; ++i) all.push(+(i * step).toPrecision(12));
  return all;
}
function log_ticks(low, high) {
  const all = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); ++e)
    for (const k of high / low > 1e3 ? [1] : [1, 2, 5]) all.push(k * 10 ** e);
  const inside = all.filter(v => v >= low && v <= high);
  return inside.length > 1 ? inside : ticks(low, high, 4);
}
const tip = make('div', {className: 'card tip', hidden: true});

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.log = false;
    this.svg = svg_element('svg', {role: 'img', 'aria-label': spec.title});
    const log = make('input', {type: 'checkbox'});
    log.onchange = () => { this.log = log.checked; this.render(); };
    this.card = make('section', {className: 'card'},
      make('div', {className: 'head'},
        make('h3', {}, spec.title, make('small', {}, spec.unit ? ` [${spec.unit}]` : '')), make('label', {}, log, ' log')),
      this.svg);
    this.svg.addEventListener('pointermove', e => this.hover(e));
    this.svg.addEventListener('pointerleave', () => { tip.hidden = true; this.over && this.over.replaceChildren(); });
    this.svg.addEventListener('pointerdown', e => { if (!spec.by_time && e.button === 0) { this.from = this.place(e); this.svg.setPointerCapture(e.pointerId); } });
    this.svg.addEventListener('pointerup', e => {
      const from = this.from, to = this.place(e);
      this.from = undefined;
      if (from === undefined || Math.abs(this.px(from) - this.px(to)) < 6) return;
      view.zoom = [Math.min(from, to), Math.max(from, to)];
      render();
    });
    this.svg.addEventListener('dblclick', () => { view.zoom = null; render(); });
  }
  has() { return runs.some(r => this.spec.by_time ? names.some(n => /^eval_loss_timestep_/.test(n) && r.metrics[n]) : r.metrics[this.spec.of]); }
  place(e) {
    const box = this.svg.getBoundingClientRect();
    return this.x0 + (e.clientX - box.left - this.left) / this.w * (this.x1 - this.x0);
  }
  px(x) { return this.left + (x - this.x0) / (this.x1 - this.x0) * this.w; }
  py(y) {
    const f = this.log ? Math.log10 : v => v;
    return this.top + (1 - (f(y) - f(this.y0)) / (f(this.y1) - f(this.y0))) * this.h;
  }
  render() {
    const svg = this.svg, width = svg.clientWidth || 440, height = 250;
    svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
    svg.replaceChildren();
    this.left = 62, this.top = 10, this.w = Math.max(50, width - 62 - 12), this.h = height - 10 - 40;
    const all = this.all = series(this.spec), zoom = this.spec.by_time ? null : view.zoom;
    let x0 = Infinity, x1 = -Infinity;
    const inside = x => x !== null && (!zoom || (x >= zoom[0] && x <= zoom[1]));
    const ok = v => v !== null && v !== undefined && isFinite(v) && (!this.log || v > 0);
    let values = [], clear = [];
    for (const s of all)
      s.x.forEach((x, i) => {
        if (!inside(x)) return;
        if (ok(s.y[i])) values.push(s.y[i]), x0 = Math.min(x0, x), x1 = Math.max(x1, x);
        if (s.smooth && ok(s.smooth[i])) clear.push(s.smooth[i]);
      });
    if (!values.length) {
      svg_element('text', {x: width / 2, y: height / 2, 'text-anchor': 'middle'}, svg).textContent = 'no values';
      this.over = null;
      return;
    }
    [x0, x1] = zoom || [x0, x1];
    if (x0 === x1) x0 -= 0.5, x1 += 0.5;
    else if (this.spec.marks && !zoom) [x0, x1] = [x0 - (x1 - x0) * 0.02, x1 + (x1 - x0) * 0.02];
    // A few outliers of what is smoothed are cut rather than all else flattened.
    values.sort((a, b) => a - b);
    const cut = clear.length > 50 ? Math.floor(values.length * 0.005) : 0;
    let y0 = values[cut], y1 = values[values.length - 1 - cut];
    for (const v of clear) y0 = Math.min(y0, v), y1 = Math.max(y1, v);
    if (this.spec.zero && !this.log) y0 = Math.min(0, y0);
    if (y0 === y1) { const d = Math.abs(y0) * 0.1 || 1; y0 -= this.log ? y0 * 0.1 : d; y1 += d; }
    else if (this.log) { const r = (y1 / y0) ** 0.04; y0 /= r; y1 *= r; }
    else { const d = (y1 - y0) * 0.05; y0 = this.spec.zero && y0 === 0 ? 0 : y0 - d; y1 += d; }
    Object.assign(this, {x0, x1, y0, y1});
    for (const t of this.log ? log_ticks(y0, y1) : ticks(y0, y1, 5)) {
      const y = this.py(t);
      svg_element('line', {class: 'grid', x1: this.left, x2: this.left + this.w, y1: y, y2: y}, svg);
      svg_element('text', {x: this.left - 6, y: y + 4, 'text-anchor': 'end'}, svg).textContent = shown(t);
    }
    for (const t of ticks(x0, x1, Math.max(2, Math.min(7, this.w / 80)))) {
      const x = this.px(t);
      svg_element('line', {class: 'grid', x1: x, x2: x, y1: this.top, y2: this.top + this.h}, svg);
      svg_element('text', {x, y: this.top + this.h + 15, 'text-anchor': 'middle'}, svg).textContent = shown(t);
    }
    svg_element('text', {x: this.left + this.w / 2, y: height - 6, 'text-anchor': 'middle'}, svg).textContent =
      this.spec.x_title || (view.x === 'step' ? 'step' : 'hours since the start');
    const id = 'clip' + CHARTS.indexOf(this.spec);
    svg_element('rect', {x: this.left, y: this.top, width: this.w, height: this.h}, svg_element('clipPath', {id}, svg_element('defs', {}, svg)));
    const area = svg_element('g', {'clip-path': `url(#${id})`, fill: 'none', 'stroke-linejoin': 'round'}, svg);
    for (const s of all) {
      if (s.smooth) this.path(area, s, s.y, {'stroke-width': 1, opacity: .28}, ok, inside);
      this.path(area, s, s.smooth || s.y, {'stroke-width': 1.8}, ok, inside);
    }
    this.over = svg_element('g', {}, svg);
  }
  path(area, s, y, style, ok, inside) {
    // One column of pixels holds its first, least, greatest and last value.
    let d = '', pen = false, column = null, low, high, end, start;
    const sparse = this.spec.marks;
    const put = (x, v) => { d += `${pen ? 'L' : 'M'}${x.toFixed(1)} ${this.py(v).toFixed(1)}`; pen = true; };
    const close = () => {
      if (column === null) return;
      put(column, start);
      if (low !== high) { put(column, low); put(column, high); put(column, end); }
      column = null;
    };
    const dots = [];
    for (let i = 0; i < y.length; ++i) {
      if (s.x[i] === null || s.x[i] === undefined || !inside(s.x[i])) continue;
      if (!ok(y[i])) {
        if (!sparse) { if (column !== null && !pen) dots.push([column, end]); close(); pen = false; }
        continue;
      }
      const x = Math.round(this.px(s.x[i]) * 2) / 2;
      if (sparse) { put(x, y[i]); dots.push([x, y[i]]); continue; }
      if (x !== column) { close(); column = x; start = low = high = y[i]; }
      low = Math.min(low, y[i]), high = Math.max(high, y[i]), end = y[i];
    }
    if (column !== null && !pen) dots.push([column, end]);
    close();
    if (d) svg_element('path', {d, stroke: s.run.color, 'stroke-dasharray': s.run.dash, ...style}, area);
    for (const [x, v] of dots) svg_element('circle', {cx: x, cy: this.py(v), r: 2.6, fill: s.run.color}, area);
  }
  hover(e) {
    if (!this.over) return;
    const at = this.place(e);
    this.over.replaceChildren();
    if (this.from !== undefined) {
      const a = this.px(this.from), b = this.px(at);
      svg_element('rect', {class: 'window', x: Math.min(a, b), y: this.top, width: Math.abs(a - b), height: this.h}, this.over);
    }
    const rows = [];
    let nearest = null;
    for (const s of this.all) {
      let best = -1;
      s.x.forEach((x, i) => {
        if (x === null || s.y[i] === null || s.y[i] === undefined || x < this.x0 || x > this.x1) return;
        if (best < 0 || Math.abs(x - at) < Math.abs(s.x[best] - at)) best = i;
      });
      if (best < 0) continue;
      rows.push([s, best]);
      if (nearest === null || Math.abs(s.x[best] - at) < Math.abs(nearest - at)) nearest = s.x[best];
    }
    if (nearest === null) { tip.hidden = true; return; }
    const x = this.px(nearest), table = make('table');
    svg_element('line', {class: 'rule', x1: x, x2: x, y1: this.top, y2: this.top + this.h}, this.over);
    for (const [s, i] of rows) {
      const y = (s.smooth || s.y)[i];
      if (!this.log || y > 0) svg_element('circle', {cx: this.px(s.x[i]), cy: this.py(y), r: 3.5, fill: s.run.color}, this.over);
      table.append(make('tr', {}, make('td', {}, make('i', {style: `background:${s.run.color}`})), make('td', {}, s.run.name),
        make('td', {}, this.spec.by_time ? `timestep ${s.x[i]}` : `step ${shown(s.run.steps[i])}`),
        make('td', {}, make('b', {}, shown(s.y[i]))), make('td', {className: 'faint'}, s.smooth ? `smoothed ${shown(s.smooth[i])}` : '')));
    }
    tip.replaceChildren(table);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, e.clientX + 16 + box.width > innerWidth ? e.clientX - box.width - 12 : e.clientX + 16) + 'px';
    tip.style.top = Math.max(4, Math.min(e.clientY + 12, innerHeight - box.height - 6)) + 'px';
  }
}
const charts = CHARTS.map(c => new Chart(c)).filter(c => c.has());
function render() { for (const c of charts) c.render(); reset.hidden = !view.zoom; }

// --- Summary ----------------------------------------------------------------------------------------------------------
const run_head = run => make('th', {className: 'run'}, make('i', {style: `background:${run.color};display:inline-block;width:.8rem;height:.8rem;border-radius:3px;margin-right:.4rem`}), run.name);
function table(head, rows) {
  const t = make('table', {}, make('thead', {}, make('tr', {}, make('th', {}, head), ...runs.map(run_head))));
  t.append(make('tbody', {}, ...rows));
  return make('div', {className: 'scroll'}, t);
}
const row = (name, cells, differs) => make('tr', {className: differs ? 'differs' : ''}, make('td', {}, name), ...cells.map(c => make('td', {}, c)));
const median = all => { const s = (all || []).filter(v => v !== null).sort((a, b) => a - b); return s.length ? s[s.length >> 1] : null; };
const SUMMARY = [
  ['steps', r => shown(last(r.steps))],
  ['last loss', r => shown(last(r.metrics.loss))],
  ['last loss, smoothed', r => shown(last(smoothed(r.metrics.loss || [])))],
  ['least held-out loss', r => {
    const v = least(r.metrics.eval_loss);
    return v === null ? null : `${shown(v)} at step ${shown(r.steps[r.metrics.eval_loss.indexOf(v)])}`;
  }],
  ['time in steps', r => r.every > 1 || !r.metrics.step_time_seconds ? null : duration(sum(r.metrics.step_time_seconds))],
  ['samples/s, median', r => r.metrics.samples_per_second ? shown(median(r.metrics.samples_per_second)) : null],
  ['step time, median', r => r.metrics.step_time_seconds ? `${shown(median(r.metrics.step_time_seconds))} s` : null],
  ['goodput', r => r.metrics.goodput ? `${(100 * last(r.metrics.goodput)).toFixed(1)} %` : null],
  ['memory of the host, most', r => r.metrics.host_memory_bytes ? `${(most(r.metrics.host_memory_bytes) / GIB).toFixed(2)} GiB` : null],
  ['memory of a device, peak', r => r.metrics.device_peak_memory_bytes ? `${(most(r.metrics.device_peak_memory_bytes) / GIB).toFixed(2)} GiB` : null],
  ['starts', r => r.starts.length ? shown(r.starts.length) : null],
  ['folder', r => r.folder],
];
const summary = make('section', {className: 'card'}), notes = make('ul', {className: 'notes'});
function summarize() {
  summary.replaceChildren(table('', SUMMARY.map(([name, f]) => [name, runs.map(f)]).filter(([, cells]) => cells.some(c => c !== null))
    .map(([name, cells]) => row(name, cells.map(c => c === null ? '–' : c)))));
  notes.replaceChildren(...runs.flatMap(r => r.notes.map(n => make('li', {}, make('b', {}, r.name), `: ${n}`))));
  notes.hidden = !notes.childElementCount;
}
summarize();
main.append(summary, notes);

// --- Charts -----------------------------------------------------------------------------------------------------------
const smooth = make('input', {type: 'range', min: 0, max: 0.998, step: 0.002});
smooth.value = view.smooth;
const smooth_shown = make('output', {}, (+smooth.value).toFixed(3));
smooth.oninput = () => { view.smooth = +smooth.value; smooth_shown.textContent = view.smooth.toFixed(3); render(); };
const by = make('select', {}, make('option', {value: 'step'}, 'step'), make('option', {value: 'hours'}, 'hours'));
by.onchange = () => { view.x = by.value; view.zoom = null; render(); };
const reset = make('button', {type: 'button', hidden: true}, 'whole run');
reset.onclick = () => { view.zoom = null; render(); };
const legend = make('div', {className: 'legend'}, ...runs.map(run => {
  const box = make('input', {type: 'checkbox', checked: true});
  box.onchange = () => { run.shown = box.checked; render(); };
  return make('label', {}, box, make('i', {style: `background:${run.color}`}), run.name);
}));
main.append(make('h2', {}, 'Curves'),
  make('div', {className: 'card bar'}, legend, make('label', {}, 'smoothing ', smooth, smooth_shown),
    runs.some(r => r.metrics.time) ? make('label', {}, 'over ', by) : '', reset,
    make('span', {className: 'faint'}, 'faint: as recorded; drag: zoom in, double click: back')),
  make('div', {className: 'charts'}, ...charts.map(c => c.card)));
document.body.append(tip);

// --- Samples ----------------------------------------------------------------------------------------------------------
const samples = make('div');
main.append(samples);
// Files of a server that may want its key.
async function source(s) {
  if (!live || s.src.startsWith('data:')) return s.src;
  return s.loaded = s.loaded || URL.createObjectURL(await (await ask(live.replace(/[^/]*$/, 'files/') + s.src)).blob());
}
function show_samples(at_end = true, place_before = 0) {
  const sampled = runs.filter(r => r.samples.length);
  samples.replaceChildren();
  if (!sampled.length) return;
  const steps = [...new Set(sampled.flatMap(r => r.samples.map(s => s.step)))].sort((a, b) => a - b);
  const slider = make('input', {type: 'range', min: 0, max: steps.length - 1, step: 1, 'aria-label': 'step of the samples'});
  slider.value = at_end ? steps.length - 1 : place_before;
  const at = make('b'), boxes = sampled.map(run => {
    const title = make('h3'), place = make('div');
    return {run, title, place, card: make('div', {className: 'card'}, title, place)};
  });
  const show = () => {
    const step = steps[+slider.value];
    at.textContent = `step ${shown(step)}`;
    for (const {run, title, place} of boxes) {
      const s = run.samples.filter(s => s.step <= step).pop();
      title.replaceChildren(run.name, make('small', {}, s ? ` step ${shown(s.step)}` : ' no samples yet'));
      const media = s && (s.video ? make('video', {controls: true, loop: true, muted: true, autoplay: true})
        : make('img', {alt: `samples of ${run.name} at step ${s.step}`}));
      place.replaceChildren(...(s ? [media] : []));
      if (s) source(s).then(src => { media.src = src; }, () => {});
    }
  };
  slider.oninput = show;
  samples.append(make('h2', {}, 'Samples'), make('div', {className: 'slider card'}, slider, at),
    make('div', {className: 'samples'}, ...boxes.map(b => b.card)));
  show();
}
show_samples();

// --- Config -----------------------------------------------------------------------------------------------------------
const keys = [...new Set(runs.flatMap(r => Object.keys(r.config)))].sort();
if (keys.length) {
  const differs = key => new Set(runs.map(r => r.config[key])).size > 1;
  const only = make('input', {type: 'checkbox', checked: runs.length > 1 && keys.some(differs)});
  const find = make('input', {type: 'search', placeholder: 'find a key or value'});
  const rows = keys.map(key => [key, row(key, runs.map(r => key in r.config ? r.config[key] : make('span', {className: 'faint'}, 'not set')), runs.length > 1 && differs(key))]);
  const filter = () => {
    for (const [key, r] of rows)
      r.hidden = (only.checked && !differs(key)) || !r.textContent.toLowerCase().includes(find.value.toLowerCase());
  };
  only.onchange = find.oninput = filter;
  main.append(make('h2', {}, 'Config'), make('section', {className: 'card'},
    make('div', {className: 'head'}, find, runs.length > 1 ? make('label', {}, only, ' differences only') : ''),
    table('key', rows.map(r => r[1]))));
  filter();
}

// --- Environment ------------------------------------------------------------------------------------------------------
const facts = ['version', 'host', 'system', 'processor', 'memory_bytes', 'plugin', 'device', 'devices', 'mesh', 'processes', 'time'];
if (runs.some(r => r.starts.length)) {
  const facts_of = (run, fact) => {
    const v = run.starts.map(s => s[fact] === undefined ? '–' : fact === 'memory_bytes' ? `${(s[fact] / GIB).toFixed(1)} GiB`
      : fact === 'time' ? new Date(s[fact] * 1000).toISOString().replace('T', ' ').slice(0, 19) : s[fact]);
    return [...new Set(v)].join(', ') || '–';
  };
  const title = {memory_bytes: 'memory', time: 'started (UTC)'};
  main.append(make('h2', {}, 'Environment'), make('section', {className: 'card'}, table('', facts.map(f => {
    const cells = runs.map(r => facts_of(r, f));
    return row(title[f] || f, cells, f !== 'time' && new Set(cells).size > 1);
  }))));
}
const written = make('p', {className: 'faint'}, `Written by maxdiffusion ${version}.`);
main.append(written);
render();
addEventListener('resize', render);

// --- Live -------------------------------------------------------------------------------------------------------------
async function ask(path, headers = {}) {
  if (sessionStorage.key_) headers.Authorization = 'Bearer ' + sessionStorage.key_;
  const answer = await fetch(path, {headers});
  if (answer.status !== 304 && !answer.ok) throw new Error(answer.status);
  return answer;
}
const shape = all => JSON.stringify(all.map(r => [r.name, Object.keys(r.metrics).sort(), r.config, r.starts.length]));
let tag = '';
async function refresh() {
  try {
    const answer = await ask(live, tag ? {'If-None-Match': tag} : {});
    written.textContent = `Live, maxdiffusion ${version}.`;
    if (answer.status === 304) return;
    tag = answer.headers.get('ETag') || '';
    const now = (await answer.json()).runs;
    if (shape(now) !== shape(runs)) { location.reload(); return; }
    const slider = samples.querySelector('input[type=range]'), before = slider ? [+slider.value, +slider.max] : [0, 0];
    const of = all => JSON.stringify(all.map(r => r.samples.map(s => [s.step, s.src])));
    const more = of(now) !== of(runs);
    runs.forEach((run, i) => Object.assign(run, {steps: now[i].steps, metrics: now[i].metrics, notes: now[i].notes, every: now[i].every}));
    if (more) { runs.forEach((run, i) => { run.samples = now[i].samples; }); show_samples(before[0] === before[1], before[0]); }
    summarize();
    render();
  } catch (error) {
    written.textContent = `The server does not answer (${error.message}).`;
  }
}
if (live) { refresh(); setInterval(refresh, 5000); }
</script>
</body>
</html>
)html";

}  // namespace md
