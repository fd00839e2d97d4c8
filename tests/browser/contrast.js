// Every visible text with less contrast to what lies behind it than WCAG AA asks for (4.5), as [ratio, text].
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const cache = new Map();
const channels = (colour) => {
  if (!cache.has(colour)) {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    cache.set(colour, [r, g, b, a / 255]);
  }
  return cache.get(colour);
};
const over = (top, under) => top.slice(0, 3).map((value, i) => value * top[3] + under[i] * (1 - top[3]));
const behind = (element) => {
  const layers = [];
  for (let e = element; e; e = e.parentElement) layers.push(channels(getComputedStyle(e).backgroundColor));
  return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255]);
};
const luminance = (rgb) => {
  const [r, g, b] = rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
document.querySelectorAll("details").forEach((fold) => { fold.open = true; });
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const weak = [];
let seen = 0;
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  const text = walker.currentNode.textContent.trim();
  if (!text || element.closest("script, style, [hidden], .skip") || !element.getClientRects().length) continue;
  const style = getComputedStyle(element);
  const under = behind(element);
  const ink = over(channels(element.closest("svg") ? style.fill : style.color), under);
  const [light, dark] = [luminance(ink), luminance(under)].sort((a, b) => b - a);
  const ratio = (light + 0.05) / (dark + 0.05);
  seen += 1;
  if (ratio < 4.5) weak.push([ratio, text]);
}
return [seen, weak];
