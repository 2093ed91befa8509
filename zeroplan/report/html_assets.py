"""The style and the script that every HTML report carries, so that it needs nothing from anywhere."""

from __future__ import annotations

STYLE = """
:root { --ink: #1b2733; --faint: #5d6b7a; --line: #e1e6eb; --paper: #ffffff; --ground: #f5f7f9; --good: #17703f; --bad: #b3132b;
  --bar: #1d4f91; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); line-height: 1.45;
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; }
h2 { font-size: 17px; margin: 0; }
h3 { font-size: 14px; margin: 26px 0 8px; }
.lead { color: var(--faint); margin: 0 0 20px; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 20px 22px; margin: 0 0 18px; }
.warning { border-left: 4px solid #d99a1c; }
.warning ul { margin: 0; padding-left: 18px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--faint); font-size: 12px; white-space: nowrap; }
td:first-child { min-width: 150px; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
.figure { text-align: right; white-space: nowrap; }
.words { color: var(--faint); }
code { font: 12px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.yes, .no { font-weight: 600; white-space: nowrap; }
.yes { color: var(--good); }
.no { color: var(--bad); }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 16px 0 6px; }
.tile { flex: 1 1 140px; border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
.tile b { display: block; font-size: 19px; font-variant-numeric: tabular-nums; }
.tile span { color: var(--faint); font-size: 12px; }
.bar { background: var(--line); border-radius: 3px; height: 9px; min-width: 120px; position: relative; margin-top: 6px; }
.bar i { display: block; height: 9px; border-radius: 3px; background: var(--bar); }
.bar i.over { background: var(--bad); }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(380px, 1fr)); gap: 8px 40px; }
summary { cursor: pointer; display: flex; gap: 14px; align-items: baseline; }
summary::before { content: "▸"; color: var(--faint); }
details[open] > summary::before { content: "▾"; }
summary h2 { flex: 1; }
.plot { position: relative; overflow-x: auto; margin: 14px -6px 0; }
.plot svg { max-width: 100%; height: auto; display: block; }
.hover { position: absolute; pointer-events: none; display: none; background: #ffffffee; border: 1px solid var(--line);
  border-radius: 6px; padding: 8px 11px; font-size: 12px; white-space: nowrap; box-shadow: 0 2px 10px #0002;
  font-variant-numeric: tabular-nums; }
.hover td:first-child { min-width: 0; }
.hover td { padding: 1px 12px 1px 0; border: 0; }
.rule { position: absolute; pointer-events: none; display: none; width: 1px; background: var(--ink); opacity: .5; }
footer { color: var(--faint); font-size: 12px; margin-top: 24px; }
@media print { body { background: #fff; } .card { break-inside: avoid; } }
"""

# Reads the points beside each picture and shows those under the pointer.
SCRIPT = """
for (const plot of document.querySelectorAll('.plot')) {
  const svg = plot.querySelector('svg'), data = JSON.parse(plot.querySelector('script').textContent);
  const hover = plot.querySelector('.hover'), rule = plot.querySelector('.rule'), frame = data.frame;
  const size = bytes => bytes >= 2 ** 30 ? (bytes / 2 ** 30).toFixed(2) + ' GiB' : (bytes / 2 ** 20).toFixed(1) + ' MiB';
  const row = (cells, name, value) => {
    const line = cells.insertRow(); line.insertCell().textContent = name;
    const cell = line.insertCell(); cell.textContent = size(value); cell.className = 'figure';
  };
  svg.addEventListener('pointerleave', () => { hover.style.display = rule.style.display = 'none'; });
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect(), scale = box.width / frame.width;
    const at = ((event.clientX - box.left) / scale - frame.left) / frame.plot;
    if (at < 0 || at > 1) { hover.style.display = rule.style.display = 'none'; return; }
    let low = 0, high = data.positions.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (data.positions[middle] < at) low = middle + 1; else high = middle;
    }
    const phase = (data.marks.find(mark => mark[0] >= at) || [1, ''])[1], cells = document.createElement('table');
    row(cells, 'reserved', data.reserved[low]); row(cells, 'allocated', data.allocated[low]);
    const parts = Object.entries(data.buffers).map(([name, values]) => [name, values[low]]).filter(part => part[1] > 2 ** 16);
    parts.sort((a, b) => b[1] - a[1]).slice(0, 9).forEach(part => row(cells, part[0], part[1]));
    const head = document.createElement('b'); head.textContent = phase ? 'up to ' + phase : 'after the last mark';
    hover.replaceChildren(head, cells);
    const x = (frame.left + data.positions[low] * frame.plot) * scale;
    rule.style.cssText = `display:block;left:${x}px;top:${frame.top * scale}px;height:${frame.height * scale}px`;
    hover.style.display = 'block';
    hover.style.left = (x + 14 + hover.offsetWidth > box.width ? x - 14 - hover.offsetWidth : x + 14) + 'px';
    hover.style.top = (frame.top * scale + 8) + 'px';
  });
}
"""
