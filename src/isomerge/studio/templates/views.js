// What results look like: a verdict, a run, a family tree, the points of a sweep.
import {el, showCommand, size, time} from "./dom.js";

const COLOURS = {identical: "good", siblings: "good", strangers: "warn", incompatible: "bad"};

// The notes of the library name arguments in backticks; beside command lines these are flags.
const asFlags = (note) => note.replace(/`([a-z_]+)`/g, (_, name) => `--${name.replaceAll("_", "-")}`);

const notes = (texts) => (texts?.length ? el("ul", {class: "hint"}, texts.map((text) => el("li", {}, asFlags(text)))) : null);

export function verdict(result, take) {
  const isFar = result.verdict === "siblings" && result.mergeability?.expected?.safe === false;
  const box = el("div", {class: `verdict ${isFar ? "warn" : COLOURS[result.verdict] ?? ""}`},
    el("span", {class: "word"}, result.verdict), el("b", {}, asFlags(result.summary)), notes(result.reasons));
  if (result.recipe) box.append(el("button", {type: "button", id: "take", onclick: () => take(result.recipe)}, "Use the suggested recipe"));
  else box.append(el("p", {class: "hint"}, result.suggestion));
  return box;
}

export function planned(plan) {
  const facts = [`${plan.tensors} tensors`, `reads ${size(plan.bytes_read)}`, `writes ${size(plan.bytes_written)}`,
    `${size(plan.peak_memory_bytes)} of memory`, plan.seconds < 1 ? time(plan.seconds) : `about ${time(plan.seconds)}`];
  return el("div", {class: "fine"}, el("b", {}, "Ready: "), facts.join(" · "),
    notes(plan.notes));
}

export const remote = (models) => el("div", {class: "fine"}, el("b", {}, "Ready: "),
  `${models.join(", ")} is not on this computer and will be downloaded; until then there is no plan.`);

export function problems(found, go) {
  const row = ({line, text}) => el("li", {},
    line === null ? text : [el("button", {type: "button", class: "link", onclick: () => go(line)}, `line ${line}`), text.replace(/^line \d+/, "")]);
  return el("div", {class: "problem"}, el("ul", {}, found.map(row)));
}

const WORDS = {waiting: "waiting", running: "running", done: "done", failed: "failed", cancelled: "stopped"};

export function progressText({state, progress, seconds, stopping}) {
  if (stopping && state === "running") return "stopping …";
  if (state !== "running") return seconds === null ? "" : time(seconds);
  if (!progress) return `starting (${time(seconds ?? 0)})`;
  const {done, total, what, left} = progress;
  if (done >= total) return `${what} · finishing`;
  const amount = total >= 1e6 ? `${size(done)} of ${size(total)}` : `${done} of ${total}`;
  return [what, amount, left === null ? null : `${time(left)} left`].filter(Boolean).join(" · ");
}

// A run is drawn once for each state: while it runs only its bar and text change, so that focus stays where it is.
export function run(job, {cancel, show, again}) {
  const row = el("li", {class: job.state, "data-state": job.state},
    el("div", {class: "head"}, el("span", {class: "word"}, WORDS[job.state]),
      el("strong", {class: "grow"}, job.out ? `${job.verb} → ${job.out}` : job.verb), el("span", {class: "facts text"})));
  if (job.state === "running") row.append(el("progress", {"aria-label": `Progress of ${job.verb} ${job.out ?? ""}`}));
  if (job.error) row.append(el("p", {}, job.error));
  const buttons = el("div", {class: "bar"});
  if (["running", "waiting"].includes(job.state)) buttons.append(el("button", {type: "button", onclick: () => cancel(job)}, "Cancel"));
  if (job.state === "done" && job.verb !== "check") buttons.append(el("button", {type: "button", onclick: () => show(job)}, job.verb === "sweep" ? "See the points" : "See the report"));
  if (["failed", "cancelled"].includes(job.state) && job.verb === "merge") buttons.append(el("button", {type: "button", onclick: () => again(job)}, "Run again"));
  if (buttons.childElementCount) row.append(buttons);
  const line = el("p", {class: "command"});
  showCommand(line, job.command);
  row.append(line);
  advance(row, job);
  return row;
}

export function advance(row, job) {
  row.querySelector(".text").textContent = progressText(job);
  const bar = row.querySelector("progress");
  if (!bar || !job.progress) return;
  bar.max = Math.max(job.progress.total, 1);
  bar.value = job.progress.done;
}

export function tree(entry) {
  const branch = ({name, role, made, parents}) => el("li", {}, el("strong", {}, name), " ",
    role ? el("span", {class: "badge"}, role) : null, " ", made ? el("span", {class: "facts"}, `by ${made} from`) : null,
    parents.length ? el("ul", {}, parents.map(branch)) : null);
  return el("ul", {class: "tree", "aria-label": `Where ${entry.name} comes from`}, branch(entry));
}

const figure = (value) => (typeof value === "number" ? String(+value.toPrecision(5)) : value ?? "–");

export function points(record, picture) {
  const names = record.parameters.map((one) => one.name);
  const best = JSON.stringify(record.best?.parameters);
  const row = (point) => el("tr", {class: JSON.stringify(point.parameters) === best ? "best" : null},
    [...names.map((name) => point.parameters[name]), point.loss, point.metric].map((value) => el("td", {}, figure(value))));
  const head = [...names, "loss", record.metric_name ?? "metric"].map((name) => el("th", {scope: "col"}, name));
  return el("div", {}, picture ? el("img", {src: picture, alt: "The sweep as a picture; the table has its numbers"}) : null,
    el("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": "Points of the sweep"},
      el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, record.points.map(row)))),
    notes(record.notes));
}
