// Draws a plan's run into its place, as wide as that is: for reports and for the page, each of which shows in its own way what is
// alive under the cursor.
{
  const GIB = 2 ** 30, SVG = 'http://www.w3.org/2000/svg';
  const SHORT = { forward: 'fwd', backward: 'bwd', initialise: 'init' };
  const size = bytes => bytes >= GIB ? (bytes / GIB).toFixed(1) + ' GiB' : Math.round(bytes / 2 ** 20) + ' MiB';
  const make = (tag, attributes, text) => {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };

  function scale(data, width, height) {
    const highest = Math.max(...data.reserved, ...data.allocated, 1), usable = data.usable ?? 0;
    const top = data.top ?? 1.06 * Math.max(highest, usable < 1.6 * highest ? usable : 0);
    const frame = { left: 58, top: 22, width: width - 66, height: height - 30 };
    return {
      frame, limit: usable < top ? usable : 0, top,
      x: position => frame.left + position * frame.width,
      y: bytes => frame.top + frame.height * (1 - bytes / top),
    };
  }

  function ticks(top) {
    const [unit, name] = top >= 2 * GIB ? [GIB, 'GiB'] : [2 ** 20, 'MiB'];
    const rough = top / unit / 5, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map(factor => factor * power).find(one => one >= rough);
    return Array.from({ length: Math.floor(top / unit / step) + 1 }, (_, at) => [at * step * unit, at ? `${+(at * step).toFixed(2)} ${name}` : '0']);
  }

  function draw(plot, data) {
    const [width, height] = [plot.clientWidth, plot.clientHeight];
    const { frame, limit, top, x, y } = scale(data, width, height);
    const svg = make('svg', { width, height, viewBox: `0 0 ${width} ${height}`, 'aria-hidden': 'true' });
    const line = (x1, y1, x2, y2, kind, more = {}) => svg.append(make('line', { x1, y1, x2, y2, class: `s-${kind}`, ...more }));
    const text = (tx, ty, words, kind, more = {}) => svg.append(make('text', { x: tx, y: ty, 'font-size': 12, class: `f-${kind}`, ...more }, words));
    for (const [value, label] of ticks(top)) {
      line(frame.left, y(value), x(1), y(value), 'line');
      text(frame.left - 8, y(value) + 4, label, 'faint', { 'text-anchor': 'end' });
    }
    // The highest sum is drawn first and filled to the ground, the lower ones over it.
    const sums = data.positions.map(() => 0), areas = [];
    for (const layer of data.layers) {
      const edge = data.positions.map((position, at) => `${x(position).toFixed(1)} ${y(sums[at] += layer.bytes[at]).toFixed(1)}`);
      const ends = [x(data.positions[0]), x(data.positions.at(-1))];
      areas.unshift(make('path', { d: `M${ends[0]} ${y(0)}L${edge.join('L')}L${ends[1]} ${y(0)}Z`, style: `--c:${layer.color};fill:var(--shade)` }));
    }
    svg.append(...areas);
    const reserved = data.positions.map((position, at) => `${x(position).toFixed(1)} ${y(data.reserved[at]).toFixed(1)}`);
    svg.append(make('path', { d: `M${reserved.join('L')}`, class: 's-ink', fill: 'none', 'stroke-width': 1.4, 'stroke-dasharray': '5 3' }));
    let start = 0;
    for (const [end, name] of data.marks) {
      line(x(end), frame.top - 6, x(end), frame.top + frame.height, 'line');
      const shown = [name, SHORT[name] ?? ''].find(words => (end - start) * frame.width > 7 * words.length);
      if (shown) text(x((start + end) / 2), 13, shown, 'faint', { 'text-anchor': 'middle' });
      start = end;
    }
    if (limit) {
      line(frame.left, y(limit), x(1), y(limit), 'bad', { 'stroke-width': 1.7, 'stroke-dasharray': '7 4' });
      text(x(1) - 4, y(limit) + 16, `the card: ${size(limit)}`, 'bad', { 'text-anchor': 'end', 'font-weight': 600, class: 'f-bad rim' });
    }
    const [px, py] = [x(data.positions[data.peak]), y(data.allocated[data.peak])];
    const late = data.positions[data.peak] > 0.6;
    svg.append(make('circle', { cx: px, cy: py, r: 4, class: 's-ink', style: 'fill:var(--paper)', 'stroke-width': 1.6 }));
    text(px + (late ? -9 : 9), py - 6, `peak ${size(data.allocated[data.peak])}`, 'ink', { 'text-anchor': late ? 'end' : 'start', 'font-weight': 600, class: 'f-ink rim' });
    plot.querySelector('svg')?.remove();
    plot.append(svg);
  }

  // The index of the point at an event of the pointer; null beside the picture.
  function pointed(plot, data, event) {
    const { frame } = scale(data, plot.clientWidth, plot.clientHeight);
    const at = (event.clientX - plot.getBoundingClientRect().left - frame.left) / frame.width;
    return at < 0 || at > 1 ? null : Math.max(0, data.positions.findLastIndex(position => position <= at));
  }

  // Where a key moves the cursor to from a point; null for another key.
  function moved(data, now, key) {
    const last = data.positions.length - 1, page = Math.ceil(last / 20);
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, PageUp: now - page, PageDown: now + page, Home: 0, End: last }[key];
    return to === undefined ? null : Math.min(Math.max(to, 0), last);
  }

  // A line at a point; none for null. Returns how far it is from the left, pixels.
  function cursor(plot, data, at) {
    plot.querySelector('.cursor')?.remove();
    if (at === null) return 0;
    const { frame, x } = scale(data, plot.clientWidth, plot.clientHeight), px = x(data.positions[at]);
    plot.querySelector('svg').append(make('line', { x1: px, x2: px, y1: frame.top, y2: frame.top + frame.height, class: 's-ink cursor' }));
    return px;
  }

  globalThis.zeroplanPlot = { cursor, draw, moved, pointed, scale, size };
}
