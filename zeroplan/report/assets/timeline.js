// Each plan's run in a report: drawn from the data beside it, with what is alive under the cursor.
{
  const { cursor, draw, moved, pointed, size } = globalThis.zeroplanPlot;

  function read(plot) {
    const data = JSON.parse(plot.querySelector('script').textContent);
    const sizes = text => { let last = 0; return text.split(',').map(one => last = one === '' ? last : data.unit * one); };
    const layers = data.layers.map(([name, color, text]) => ({ name, color, bytes: sizes(text) }));
    const [allocated, reserved] = [sizes(data.allocated), sizes(data.reserved)];
    const peak = allocated.indexOf(Math.max(...allocated));
    return { ...data, layers, allocated, reserved, peak, positions: data.positions.split(',').map(Number) };
  }

  function tell(plot, data, at) {
    plot.querySelector('.tip')?.remove();
    const px = cursor(plot, data, at);
    if (at === null) return;
    const tip = document.createElement('div'), table = document.createElement('table');
    const head = document.createElement('b'), phase = data.marks.find(mark => mark[0] >= data.positions[at]);
    head.textContent = phase ? phase[1] : '';
    const row = (name, bytes, color) => {
      const line = table.insertRow(), cell = line.insertCell();
      if (color) {
        const chip = document.createElement('i');
        chip.className = 'chip';
        chip.style.setProperty('--c', color);
        cell.append(chip);
      }
      cell.append(name);
      const figure = line.insertCell();
      figure.className = 'figure';
      figure.textContent = size(bytes);
    };
    row('reserved', data.reserved[at]);
    row('allocated', data.allocated[at]);
    const parts = data.layers.map(layer => [layer.name, layer.bytes[at], layer.color]).filter(part => part[1] > 2 ** 20);
    parts.sort((a, b) => b[1] - a[1]).slice(0, 7).forEach(part => row(...part));
    tip.className = 'tip';
    tip.append(head, table);
    plot.append(tip);
    const room = plot.clientWidth - tip.offsetWidth;
    tip.style.left = Math.max(0, Math.min(room, px + 14 < room ? px + 14 : px - 14 - tip.offsetWidth)) + 'px';
  }

  for (const plot of document.querySelectorAll('.plot')) {
    let data = null, now = null;
    new ResizeObserver(() => {
      if (!plot.clientWidth) return;  // folded away
      data ??= read(plot);
      draw(plot, data);
    }).observe(plot);
    const show = at => { now = at; tell(plot, data, at); };
    plot.addEventListener('pointermove', event => { if (data) show(pointed(plot, data, event)); });
    plot.addEventListener('pointerleave', () => { if (data) show(null); });
    plot.addEventListener('blur', () => { if (data) show(null); });
    plot.addEventListener('keydown', event => {
      const to = data && moved(data, now ?? data.peak, event.key);
      if (to === null) return;
      event.preventDefault();
      show(to);
    });
  }
}
