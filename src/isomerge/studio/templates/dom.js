// Small helpers: elements, requests, numbers.
export const $ = (id) => document.getElementById(id);

// el("p", {class: "hint", onclick: f}, "text", child): texts are never read as HTML.
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((one) => one !== null && one !== undefined && one !== false));
  return made;
}

export class Refused extends Error {}

export async function ask(action, given) {
  const how = given === undefined ? {} : {
    method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(given),
  };
  let answer;
  try {
    answer = await fetch(`api/${action}`, how);
  } catch {
    $("lost").hidden = false;
    throw new Refused("isomerge studio does not answer.");
  }
  $("lost").hidden = true;
  if (answer.ok) return answer.json();
  const found = await answer.json().catch(() => ({}));
  throw new Refused(found.error ?? `The request failed (${answer.status}). See the terminal where isomerge studio runs.`);
}

export function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; bytes >= 1000 && unit < 4; unit++) bytes /= 1000;
  return `${unit && bytes < 10 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}

export function time(seconds) {
  if (seconds < 1) return "less than a second";
  if (seconds < 100) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

// A command line with a button that copies it.
export function showCommand(place, command) {
  place.hidden = !command;
  if (!command || place.dataset.command === command) return;
  place.dataset.command = command;
  place.replaceChildren(el("code", {}, command), copyButton(command));
}

function copyButton(command) {
  const button = el("button", {type: "button", "aria-label": `Copy the command: ${command}`}, "Copy");
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(command).then(() => { button.textContent = "Copied"; }, () => {
      getSelection().selectAllChildren(button.previousElementSibling);
    });
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

// A name that cannot be taken for a flag, nor for somebody's home.
export const named = (name) => (/^[-~]/.test(name) ? `./${name}` : name);

// A word that a shell takes as it is, or in quotes.
export const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\"'\"'")}'`);
