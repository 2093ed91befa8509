// Two plans side by side: every figure of either, and the difference from the first to the second.
{
  const place = document.getElementById('beside');
  if (place) {
    const plans = JSON.parse(place.querySelector('script').textContent);
    const [left, right] = [document.getElementById('left'), document.getElementById('right')];
    const gib = bytes => bytes === undefined ? '-' : (bytes / 2 ** 30).toFixed(1);
    const show = () => {
      const pair = [plans[left.value], plans[right.value]];
      const table = document.createElement('table'), head = table.createTHead().insertRow();
      for (const [at, words] of ['GiB', pair[0].name, pair[1].name, 'difference'].entries()) {
        const cell = document.createElement('th');
        cell.textContent = words;
        if (at) cell.className = 'figure';
        head.append(cell);
      }
      const body = table.createTBody(), found = new Map();
      const add = (words, kinds = []) => {
        const row = body.insertRow();
        words.forEach((text, at) => {
          const cell = row.insertCell(), inner = document.createElement('span');
          inner.textContent = text;
          inner.className = kinds[at] ?? '';
          if (at) cell.className = 'figure';
          cell.append(inner);
        });
        return row;
      };
      add(['fits', pair[0].fits, pair[1].fits, ''], ['', pair[0].mark, pair[1].mark]);
      pair.forEach((plan, at) => plan.rows.forEach(([part, name, bytes]) => {
        const key = `${part}|${name}`;
        if (!found.has(key)) found.set(key, { part, name, bytes: [] });
        found.get(key).bytes[at] = bytes;
      }));
      const rows = [...found.values()], most = Math.max(...rows.flatMap(row => row.bytes.filter(Boolean)));
      let part = '';
      for (const one of rows.sort((a, b) => a.part.localeCompare(b.part))) {
        if (!one.bytes.some(bytes => bytes >= 0.002 * most)) continue;
        if (one.part !== part) add([part = one.part, '', '', '']).className = 'part';
        const change = (one.bytes[1] ?? 0) - (one.bytes[0] ?? 0), shown = Math.abs(change) >= 0.05 * 2 ** 30;
        const words = shown ? `${change < 0 ? '−' : '+'}${gib(Math.abs(change))}` : '';
        add([one.name, gib(one.bytes[0]), gib(one.bytes[1]), words], ['', '', '', change < 0 ? 'less' : 'more-than']);
      }
      document.getElementById('differences').replaceChildren(table);
    };
    left.addEventListener('change', show);
    right.addEventListener('change', show);
    show();
  }
}
