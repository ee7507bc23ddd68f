// Asks the planner for every change of the form, one question at a time, and shows its answer.
"use strict";
const form = document.querySelector("form");
const results = document.getElementById("results");
const said = document.getElementById("said");
const save = document.getElementById("save");
let changed = "", asking = false, again = false, timer = 0;

function query() {
  const given = new URLSearchParams();
  for (const [name, value] of new FormData(form)) if (value.trim() !== "") given.append(name, value.trim());
  return given;
}

function knownBy() {
  const by = form.elements.by.value;
  for (const field of form.querySelectorAll("[data-by]")) field.hidden = field.dataset.by !== by;
}

// A slider goes by powers of two; where an empty field has a meaning of its own, that is its first place.
function slide(slider) {
  const first = Number(slider.dataset.empty), place = Number(slider.value);
  form.elements[slider.dataset.for].value = place < first ? "" : String(2 ** (place - first));
}

function follow(slider) {
  const first = Number(slider.dataset.empty), value = Number(form.elements[slider.dataset.for].value);
  slider.value = value >= 1 ? String(Math.round(Math.log2(value)) + first) : "0";
  const box = form.elements[slider.dataset.for];
  slider.setAttribute("aria-valuetext", box.value || box.placeholder);
}

function complain(name, message) {
  for (const place of form.querySelectorAll(".error")) place.textContent = "";
  for (const box of form.querySelectorAll("[aria-invalid]")) box.removeAttribute("aria-invalid");
  const box = form.elements[name];
  if (!message || !box) return;
  document.getElementById("error-" + name).textContent = message;
  box.setAttribute("aria-invalid", "true");
}

async function ask() {
  if (asking) { again = true; return; }
  asking = true;
  const given = query();
  results.classList.add("stale");
  try {
    const answer = await fetch("plan?" + given);
    const found = await answer.json();
    if (found.error) {
      const named = form.elements[found.field], shown = named && !named.closest("[hidden]");
      complain(shown ? found.field : changed || "model", found.error);
      said.textContent = found.error;
    } else {
      const open = [...results.querySelectorAll("details")].map(part => part.open);
      results.innerHTML = found.html;
      results.querySelectorAll("details").forEach((part, place) => { part.open = open[place] || false; });
      results.classList.remove("stale");
      complain("", "");
      said.textContent = found.sentences.join(" ");
      document.title = found.title;
      history.replaceState(null, "", "?" + given);
      save.href = "page.html?" + given;
    }
  } catch (error) {
    said.textContent = "The planner does not answer any more: is onefold plan --serve still running?";
  }
  asking = false;
  document.body.dataset.answered = String(Number(document.body.dataset.answered || 0) + 1);
  if (again) { again = false; ask(); }
}

form.addEventListener("input", event => {
  const slider = event.target.dataset.for;
  if (slider) slide(event.target);
  changed = slider || event.target.name;
  for (const other of form.querySelectorAll("[data-for]")) if (other !== event.target) follow(other);
  if (slider) follow(event.target);
  knownBy();
  clearTimeout(timer);
  timer = setTimeout(ask, 150);
});
form.addEventListener("submit", event => { event.preventDefault(); ask(); });
results.addEventListener("click", async event => {
  if (!event.target.matches(".copy")) return;
  await navigator.clipboard.writeText(event.target.parentElement.querySelector("code").textContent);
  said.textContent = "Copied.";
  event.target.textContent = "Copied";
});
form.querySelectorAll("[data-for]").forEach(follow);
knownBy();
if (!results.firstElementChild) ask();  // what is wrong with the first values stands beside its field
