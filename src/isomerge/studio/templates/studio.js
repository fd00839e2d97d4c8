// The page: what is chosen, the recipe as form and text, runs and results. The server judges; nothing is decided here.
import {$, ask, el, named, quoted, Refused, showCommand, size, time} from "./dom.js";
import * as views from "./views.js";

const METHODS = Object.fromEntries(JSON.parse($("methods").textContent).map((method) => [method.name, method]));
const KEPT = "isomerge-studio";
const state = {listing: {models: []}, form: null, ready: false, jobs: new Map()};

// --- 1 choose ---
async function list() {
  const found = await ask("listing");
  if (JSON.stringify(found) === JSON.stringify(state.listing)) return; // rows stay under the finger that is on them
  state.listing = found;
  const {models, data, recipes, outputs} = state.listing;
  const rows = models.map((model) => el("li", {"data-path": model.path},
    model.kind === "model"
      ? el("label", {}, el("input", {type: "checkbox", value: model.path, onchange: choose}), el("strong", {}, model.path))
      : el("span", {class: "grow", title: "In a recipe: model+adapter"}, model.path),
    el("span", {class: "badge"}, model.kind === "model" ? model.type : `adapter: ${model.type}`),
    el("span", {class: "facts"}, [size(model.bytes), model.dtype].filter(Boolean).join(" · "))));
  keepFocus($("models"), rows);
  $("no-models").hidden = models.length > 0;
  $("search").hidden = models.length < 9;
  options($("check-data"), data, "no data (seconds)");
  options($("sweep-data"), data, data.length ? null : "no data below this folder");
  $("recipes").hidden = !recipes.length;
  options($("recipes").querySelector("select"), recipes, "a recipe of this folder …");
  keepFocus($("outputs"), outputs.map(output));
  $("no-outputs").hidden = outputs.length > 0;
  tick();
}

function keepFocus(place, rows) {
  const at = [...place.querySelectorAll("input, button")].indexOf(document.activeElement);
  place.replaceChildren(...rows);
  if (at >= 0) place.querySelectorAll("input, button")[at]?.focus();
}

function options(select, names, first) {
  const before = select.value;
  select.replaceChildren(...(first ? [el("option", {value: ""}, first)] : []), ...names.map((name) => el("option", {}, name)));
  if (names.includes(before)) select.value = before;
}

const ticked = () => (state.form?.models ?? []).map((one) => one.model);

function tick() {
  const chosen = ticked();
  for (const box of $("models").querySelectorAll("input")) {
    box.checked = chosen.includes(box.value);
    box.disabled = !state.form;
  }
  $("check").disabled = chosen.length < 2;
  const data = $("check-data").value;
  const words = ["isomerge", "check", ...chosen.map(named), ...(data ? ["--data", named(data)] : [])];
  showCommand($("check-command"), chosen.length < 2 ? "" : words.map(quoted).join(" "));
}

function choose(event) {
  const {value, checked} = event.target;
  const models = state.form.models.filter((one) => one.model !== value);
  if (checked) models.push({model: value, weight: ""});
  $("verdict").replaceChildren();
  change({models});
}

async function check() {
  $("check").disabled = true;
  $("verdict").replaceChildren(el("p", {class: "hint"}, "Reading headers and a sample of the weights …"));
  try {
    const answer = await ask("check", {models: ticked(), data: $("check-data").value || null});
    if (answer.result) $("verdict").replaceChildren(views.verdict(answer.result, take));
    else { $("verdict").replaceChildren(el("p", {class: "hint"}, "Measuring: see Run below.")); await watch(); }
  } catch (error) { $("verdict").replaceChildren(refusal(error)); }
  tick();
}

const refusal = (error) => {
  if (!(error instanceof Refused)) throw error;
  return el("p", {class: "problem", role: "alert"}, error.message);
};

function take(recipe) {
  $("text").value = recipe;
  judge();
  $("text").focus();
}

const open = (path) => ask("open", {path}).then(({text}) => take(text), (error) => $("judgement").replaceChildren(refusal(error)));

// --- 2 recipe ---
let asked = 0; // of what is typed, which version: an answer about an older one is dropped
let later, isBusy = false, next;

async function judge(form = null) {
  const number = ++asked;
  clearTimeout(later);
  if (isBusy) { next = form; return; }
  isBusy = true;
  next = undefined;
  const answer = await ask("recipe", {text: $("text").value, form}).catch(refusal);
  isBusy = false;
  if (number === asked) answered(answer, form);
  else if (next !== undefined) judge(next);
}

function answered(answer, form) {
  if (answer instanceof Node) { $("judgement").replaceChildren(answer); return; }
  if (form) $("text").value = answer.text;
  const isEmpty = !$("text").value.trim();
  state.form = answer.form;
  state.ready = !answer.problems.length && !isEmpty;
  if (isEmpty) $("judgement").replaceChildren();
  else if (answer.problems.length) $("judgement").replaceChildren(views.problems(answer.problems, goTo));
  else $("judgement").replaceChildren(answer.plan ? views.planned(answer.plan) : views.remote(answer.remote));
  if (!form || !$("form").contains(document.activeElement)) fill();
  tick();
  lines();
}

function change(part) {
  Object.assign(state.form, part);
  asked++; // an answer on its way does not know of this
  clearTimeout(later);
  later = setTimeout(() => judge(state.form), 150);
  fill();
  tick();
}

function goTo(line) {
  const before = $("text").value.split("\n").slice(0, line - 1).join("\n").length + (line > 1);
  const end = $("text").value.indexOf("\n", before);
  $("text").focus();
  $("text").setSelectionRange(before, end < 0 ? $("text").value.length : end);
}

function fill() {
  const {form} = state;
  $("no-form").hidden = Boolean(form);
  $("fields").disabled = !form;
  if (!form) return;
  const method = METHODS[form.method];
  $("method").value = form.method;
  $("method-summary").textContent = method?.summary ?? "";
  const names = [...new Set([form.base, ...state.listing.models.filter((one) => one.kind === "model").map((one) => one.path)])].filter(Boolean);
  options($("base"), names, "none");
  $("base").value = form.base;
  $("based").hidden = method?.base === "ignored" && !form.base;
  $("base-hint").textContent = {required: `${form.method} needs it: the model that the others were tuned from, or the first of two.`,
    optional: "Their common ancestor, if there is one."}[method?.base] ?? "Not used by this method.";
  $("align").value = form.align;
  const own = (method?.options ?? []).filter((one) => one.name !== "weight");
  rebuild($("weights"), JSON.stringify([form.method, ticked()]), () => form.models.map((one, place) => {
    const id = `weight-${place}`;
    return el("div", {class: "weight"}, el("label", {for: id}, `Weight of ${one.model}`),
      el("input", {id, inputmode: "decimal", placeholder: "equal", oninput: (event) => {
        change({models: state.form.models.map((row, at) => (at === place ? {...row, weight: event.target.value} : row))});
      }}));
  }));
  $("weights").hidden = !(method?.options ?? []).some((one) => one.name === "weight");
  form.models.forEach((one, place) => put($(`weight-${place}`), one.weight));
  $("more").hidden = !own.length;
  $("more").firstElementChild.textContent = `Options of ${form.method} (${own.length})`;
  if (rebuild($("options"), form.method, () => own.map((option) => el("label", {class: "option"}, option.name,
    el("input", {name: option.name, placeholder: option.default, oninput: (event) => {
      change({options: {...state.form.options, [option.name]: event.target.value}});
    }}), el("span", {class: "hint"}, option.help))))) $("more").open = own.length <= 3;
  for (const input of $("options").querySelectorAll("input")) put(input, form.options[input.name] ?? "");
}

function rebuild(place, key, make) {
  if (place.dataset.key === key) return false;
  place.dataset.key = key;
  place.replaceChildren(...make());
  return true;
}

const put = (input, value) => { if (document.activeElement !== input) input.value = value; };

// --- 3 run ---
function lines() {
  const out = $("out").value.trim();
  const over = $("over").value.trim().split(/\s+/).flatMap((one) => ["--over", one]);
  const force = $("force").checked ? ["--force"] : [];
  const data = $("sweep-data").value;
  $("merge").disabled = !state.ready || !out;
  $("sweep").disabled = !state.ready || !data || !$("sweep-out").value.trim() || !$("over").value.trim();
  const spelled = (words) => words.map(quoted).join(" ");
  showCommand($("merge-command"), $("merge").disabled ? "" : spelled(["isomerge", "merge", named(`${out}.yml`), "-o", named(out), ...force]));
  const swept = $("sweep-out").value.trim();
  showCommand($("sweep-command"), $("sweep").disabled ? "" : spelled(["isomerge", "sweep", named(`${swept}.yml`), ...over, "--data", named(data), "-o", named(swept), ...force]));
  sessionStorage.setItem(KEPT, JSON.stringify({text: $("text").value, out: $("out").value}));
}

async function start(action, given) {
  $("refused").hidden = true;
  try {
    await ask(action, given);
    await watch();
    $("jobs").scrollIntoView({block: "nearest"});
  } catch (error) {
    $("refused").textContent = refusal(error).textContent;
    $("refused").hidden = false;
  }
}

const handlers = {
  cancel: (job) => start("cancel", {number: job.number}),
  again: (job) => start("again", {out: job.out}),
  show: (job) => {
    const found = state.listing.outputs.find((one) => one.path === job.out);
    if (found) (found.kind === "sweep" ? showPoints : showReport)(found);
  },
};
let watching;

async function watch() {
  clearTimeout(watching);
  const {jobs} = await ask("runs").catch((error) => ({jobs: null, error: refusal(error)}));
  if (jobs) await draw(jobs);
  const active = jobs?.some((job) => ["running", "waiting"].includes(job.state));
  watching = setTimeout(watch, active ? 400 : 4000);
}

async function draw(jobs) {
  let isOver = false;
  for (const job of [...jobs].reverse()) {
    const known = state.jobs.get(job.number);
    if (known?.state === job.state && known.stopping === job.stopping) { views.advance(known.row, job); continue; }
    const row = views.run(job, handlers);
    const had = known?.row.contains(document.activeElement);
    if (known) known.row.replaceWith(row); else $("jobs").prepend(row);
    if (had) row.querySelector("button")?.focus();
    state.jobs.set(job.number, {state: job.state, stopping: job.stopping, row});
    if (known || ["running", "waiting"].includes(job.state)) say(`${job.verb} ${job.out ?? ""}: ${job.state}`);
    isOver ||= !["running", "waiting"].includes(job.state);
    if (job.state === "done" && job.verb === "check" && known) $("verdict").replaceChildren(views.verdict(job.result, take));
  }
  const current = jobs.find((job) => job.state === "running");
  if (current?.progress) speakProgress(current);
  document.title = document.title.replace(/^(\d+ % · )?/, current?.progress ? `${share(current)} % · ` : "");
  if (isOver) await list();
}

const share = ({progress}) => Math.floor((100 * progress.done) / Math.max(progress.total, 1));
const say = (text) => { $("spoken").textContent = text; };
let spoken = "";

// Every tenth is read out: a reader that hears every step hears nothing else.
function speakProgress(job) {
  const key = `${job.number} ${job.progress.what} ${Math.floor(share(job) / 10)}`;
  if (key === spoken) return;
  spoken = key;
  const {left} = job.progress;
  say(`${job.progress.what}: ${share(job)} percent${left === null ? "" : `, ${time(left)} left`}`);
}

// --- 4 results ---
const NAMES = {merge: "merged model", align: "aligned model", adapters: "merged adapter", demo: "demo", sweep: "sweep", unfinished: "unfinished", damaged: "damaged"};

function output(one) {
  const button = (text, act, about = text) => el("button", {type: "button", "aria-label": `${about}: ${one.path}`, onclick: act}, text);
  return el("li", {"data-path": one.path}, el("div", {class: "grow"}, el("strong", {}, one.path), " ",
    el("span", {class: "badge"}, NAMES[one.kind] ?? one.kind), el("p", {class: `hint ${one.tone ?? ""}`},
      one.label ? el("span", {class: "word"}, one.label, ": ") : null, one.summary ?? (one.kind === "unfinished" ? "A run stopped here. The same command goes on from there." : ""))),
    el("span", {class: "buttons"}, one.report ? button("Report", () => showReport(one)) : null,
    one.kind === "sweep" ? button("Points", () => showPoints(one)) : null,
    ["merge", "align", "adapters"].includes(one.kind) ? button("Lineage", () => showLineage(one)) : null,
    one.recipe ? button("Continue", () => start("again", {out: one.path})) : null));
}

function view(title, command, ...content) {
  $("viewer-title").textContent = title;
  const line = el("p", {class: "command"});
  showCommand(line, command);
  $("viewed").replaceChildren(line, ...content);
  $("viewer").hidden = false;
  $("viewer-title").focus({preventScroll: true});
  $("viewer").scrollIntoView();
}

function showReport(one) {
  if (!one.report) { showLineage(one); return; }
  const frame = el("iframe", {src: one.report, sandbox: "allow-scripts", referrerpolicy: "no-referrer", title: `Report of ${one.path}`});
  view(`Report of ${one.path}`, `isomerge report ${quoted(one.path)} --open`, frame);
}

async function showPoints(one) {
  const best = `${one.path}/best.yml`;
  const use = el("button", {type: "button", onclick: () => open(best)}, "Use the best recipe");
  const shown = await ask("points", {path: one.path}).then((record) => [use, views.points(record, one.picture)], refusal);
  view(`Points of ${one.path}`, `isomerge merge ${quoted(best)} -o best`, ...[shown].flat());
}

async function showLineage(one) {
  const shown = await ask("lineage", {path: one.path}).then(views.tree, refusal);
  view(`Lineage of ${one.path}`, `isomerge report ${quoted(one.path)} --open`, shown);
}

// --- listen ---
$("method").append(...Object.keys(METHODS).map((name) => el("option", {}, name)));
for (const key of ["method", "base", "align"]) {
  $(key).addEventListener("change", (event) => change(key === "method" ? {method: event.target.value, options: {}} : {[key]: event.target.value}));
}
$("form").addEventListener("submit", (event) => event.preventDefault());
$("text").addEventListener("input", () => { asked++; clearTimeout(later); later = setTimeout(judge, 250); });
$("check").addEventListener("click", check);
$("check-data").addEventListener("change", tick);
for (const key of ["out", "over", "sweep-out", "sweep-data", "force"]) $(key).addEventListener("input", lines);
$("merge").addEventListener("click", () => start("merge", {text: $("text").value, out: $("out").value, force: $("force").checked}));
$("sweep").addEventListener("click", () => start("sweep", {
  text: $("text").value, out: $("sweep-out").value, over: $("over").value, data: $("sweep-data").value, force: $("force").checked,
}));
$("close").addEventListener("click", () => { $("viewer").hidden = true; $("viewed").replaceChildren(); $("results").scrollIntoView(); });
$("search").addEventListener("input", (event) => {
  for (const row of $("models").children) row.hidden = !row.dataset.path.toLowerCase().includes(event.target.value.toLowerCase());
});
$("recipes").querySelector("select").addEventListener("change", (event) => {
  if (event.target.value) open(event.target.value);
  event.target.value = "";
});

const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "{}");
$("text").value = kept.text ?? "";
$("out").value = kept.out ?? "merged";
await list();
await judge();
await watch();
