// The button for light and dark, and links to what is folded.
const theme = document.getElementById('theme');
const root = document.documentElement;
const told = (name, value) => {
  try { return value === undefined ? localStorage.getItem(name) : localStorage.setItem(name, value); } catch { return null; }
};
if (['light', 'dark'].includes(told('zeroplan-theme'))) root.dataset.theme = told('zeroplan-theme');
theme.addEventListener('click', () => {
  const now = root.dataset.theme ?? (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light');
  root.dataset.theme = now === 'dark' ? 'light' : 'dark';
  told('zeroplan-theme', root.dataset.theme);
});
const unfold = () => {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  if (target instanceof HTMLDetailsElement) target.open = true;
};
addEventListener('hashchange', unfold);
document.addEventListener('click', event => { if (event.target.closest?.('a[href^="#"]')) setTimeout(unfold); });
unfold();
