// Reads the points beside each picture and shows those under the pointer.
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
