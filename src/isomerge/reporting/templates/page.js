"use strict";
(() => {
  const all = (query, within = document) => [...within.querySelectorAll(query)];

  // Theme: as the system, light, dark. A file that was opened from disk may not remember it, and need not.
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const themes = ["system", "light", "dark"];
  const remember = (value) => { try { localStorage.setItem("isomerge-theme", value); } catch { /* not allowed */ } };
  const remembered = () => { try { return localStorage.getItem("isomerge-theme"); } catch { return null; } };
  const wear = (theme) => {
    if (theme === "system") root.removeAttribute("data-theme"); else root.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
    button.setAttribute("aria-label", `Theme: ${theme === "system" ? "as the system" : theme}`);
  };
  let theme = themes.includes(remembered()) ? remembered() : "system";
  wear(theme);
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    wear(theme);
    remember(theme);
  });

  // Tables: a heading sorts, and sorts the other way when it is used again. What is unknown stays at the end.
  const key = (row, place) => {
    const text = row.cells[place].dataset.v;
    if (text === "") return null;
    const number = Number(text);
    return Number.isNaN(number) ? text : number;
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  for (const table of all("table.sortable")) {
    const heads = all("thead th", table);
    heads.forEach((head, place) => head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const body = table.tBodies[0];
      const rows = [...body.rows].map((row) => [key(row, place), row]);
      rows.sort(([a], [b]) => (a === null) - (b === null) || (down ? -1 : 1) * compare(a, b));
      body.append(...rows.map(([, row]) => row));
    }));
  }

  // Layers: "0-3, 7" shows these; nothing shows all.
  const input = document.getElementById("layers");
  if (input) {
    const shown = document.getElementById("shown");
    const rows = all("tr[data-layer]");
    const wanted = (text) => {
      const ranges = text.split(",").map((part) => part.trim()).filter(Boolean);
      const found = ranges.map((part) => /^(\d+)(?:\s*-\s*(\d+))?$/.exec(part));
      if (found.includes(null)) return null;
      return (layer) => found.length === 0 || found.some((m) => layer >= +m[1] && layer <= +(m[2] ?? m[1]));
    };
    let told = "";
    // Half-typed ranges ("3-") wait for the rest: what was shown stays, and only what is left there is called wrong.
    const filter = (finished) => {
      const keep = wanted(input.value);
      input.setAttribute("aria-invalid", String(keep === null && finished));
      if (keep === null) { shown.textContent = finished ? "Write numbers and ranges, as in 0-3,7" : told; return; }
      let count = 0;
      for (const row of rows) {
        row.hidden = !keep(+row.dataset.layer);
        count += !row.hidden;
      }
      told = shown.textContent = input.value.trim() ? `${count} of ${rows.length} rows` : "";
    };
    input.addEventListener("input", () => filter(false));
    for (const left of ["change", "blur"]) input.addEventListener(left, () => filter(true));
    input.form.addEventListener("submit", (event) => { event.preventDefault(); filter(true); });
    input.addEventListener("keydown", (event) => { if (event.key === "Escape") { input.value = ""; filter(true); } });
  }

  // Values under the pointer. The same numbers stand in tables, so nothing is only here.
  const tip = document.getElementById("tip");
  document.addEventListener("pointermove", (event) => {
    const at = event.target.closest?.("[data-tip]");
    tip.hidden = !at;
    if (!at) return;
    tip.textContent = at.dataset.tip;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${event.clientY > innerHeight - 60 ? event.clientY - box.height - 10 : event.clientY + 16}px`;
  });
  document.addEventListener("pointerleave", () => { tip.hidden = true; });

  // Copying: where the clipboard is not to be had, the text is selected for the keyboard.
  const copies = async (text, shown) => {
    try { await navigator.clipboard.writeText(text); return true; } catch { /* not allowed here */ }
    const range = document.createRange();
    range.selectNodeContents(shown);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    return document.execCommand("copy");
  };
  for (const button of all(".copy")) {
    const shown = button.previousElementSibling;
    button.addEventListener("click", async () => {
      button.textContent = (await copies(shown.textContent, shown)) ? "Copied" : "Selected";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }

  // On paper everything is unfolded.
  addEventListener("beforeprint", () => all("details").forEach((fold) => { fold.dataset.was = fold.open; fold.open = true; }));
  addEventListener("afterprint", () => all("details").forEach((fold) => { fold.open = fold.dataset.was === "true"; }));
})();
