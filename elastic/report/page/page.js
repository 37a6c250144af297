// Shows the numbers below the pointer.
const data = JSON.parse(document.getElementById('data').textContent);
const number = v => Math.abs(v) >= 1000 && Math.abs(v) < 1e7 ? Math.round(v).toLocaleString('en') : String(+v.toPrecision(4));
const clock = s => s < 60 ? s.toFixed(1) + ' s' : s < 3600 ? (s / 60).toFixed(1) + ' min'
  : s < 172800 ? (s / 3600).toFixed(2) + ' h' : (s / 86400).toFixed(2) + ' d';
const nearest = (points, at) => points.reduce((best, p) => Math.abs(p[0] - at) < Math.abs(best[0] - at) ? p : best, points[0]);

for (const plot of document.querySelectorAll('.plot')) {
  const {unit, x: [low, high], edges: [left, right], lines, lanes} = data[plot.dataset.chart];
  const tip = plot.querySelector('.tip'), rule = plot.querySelector('.rule'), slack = (high - low) / 120;
  plot.addEventListener('pointerleave', () => { tip.hidden = rule.hidden = true; });
  plot.addEventListener('pointermove', event => {
    const box = plot.getBoundingClientRect();
    const at = low + ((event.clientX - box.left) / box.width - left) / (right - left) * (high - low);
    const near = nearest(lines.flatMap(line => line.points), at)[0];
    const said = [unit === 's' ? clock(near) + ' since the beginning' : 'step ' + near.toLocaleString('en')];
    for (const {name, look, points} of lines) {
      const [x, least, greatest, mean] = nearest(points, near);
      if (look === 'stairs' || Math.abs(x - near) <= slack)
        said.push(`${name}: ${number(mean)}` + (least < greatest ? ` (${number(least)} to ${number(greatest)})` : ''));
    }
    for (const [x, count, texts] of lanes.flatMap(lane => lane.marks))
      if (Math.abs(x - near) <= slack && said.length < 9)
        said.push('• ' + texts.join('\n• ') + (count > texts.length ? ` and ${count - texts.length} more` : ''));
    tip.textContent = said.join('\n');
    tip.hidden = rule.hidden = false;
    const place = (left + (near - low) / (high - low) * (right - left)) * box.width;
    const beside = place + 12 + tip.offsetWidth > box.width ? place - 12 - tip.offsetWidth : place + 12;
    rule.style.left = place + 'px';
    tip.style.left = Math.max(0, beside) + 'px';
  });
}
