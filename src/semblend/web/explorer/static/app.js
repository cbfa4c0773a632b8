// The explorer's page. No framework and no build step: data comes from /api, text goes in as text nodes only.
import { TokenStrip } from "/strip.js";

const COLOURS = 8;
const TYPING_PAUSE_MS = 250;
const $ = (id) => document.getElementById(id);

const state = { donors: [], colourOf: new Map(), result: null, asked: 0 };
const strip = new TokenStrip($("strip-box"), $("strip"), $("strip-note"), colour);

// ---- small helpers ---------------------------------------------------------------------------------------

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "colour") node.style.setProperty("--c", value);
    else if (value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

async function api(method, path, body) {
  const init = { method };
  if (body) Object.assign(init, { headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  let answer;
  try {
    answer = await fetch(path, init);
  } catch {
    throw new Error("the explorer does not answer; is semblend serve still running?");
  }
  const data = await answer.json();
  if (!answer.ok) throw new Error(data.hint ? `${data.error}. ${data.hint}` : data.error);
  return data;
}

/** A donor keeps its colour for as long as it lives, whatever the order of use. */
function colour(donorId) {
  if (donorId === null || donorId === undefined) return "var(--cold)";
  if (!state.colourOf.has(donorId)) {
    const taken = new Set(state.colourOf.values());
    let free = 0;
    while (free < COLOURS && taken.has(free)) free += 1;
    state.colourOf.set(donorId, free < COLOURS ? free : state.colourOf.size % COLOURS);
  }
  return `var(--d${state.colourOf.get(donorId)})`;
}

const number = (value) => value.toLocaleString("en");
const tokens = (count) => `${number(count)} token${count === 1 ? "" : "s"}`;
const percent = (part, whole) => (whole ? Math.floor((100 * part) / whole) : 0);
const ms = (value) => (value === null || value === undefined ? "–" : `${value < 10 ? value.toFixed(2) : value.toFixed(1)} ms`);

function problem(error) {
  $("problem").textContent = error ? error.message : "";
  $("problem").hidden = !error;
}

function guarded(action) {
  return async (...given) => {
    try {
      problem(null);
      await action(...given);
    } catch (error) {
      problem(error);
    }
  };
}

// ---- donors ----------------------------------------------------------------------------------------------

async function loadDonors() {
  state.donors = (await api("GET", "/api/donors")).donors;
  const alive = new Set(state.donors.map((donor) => donor.donor_id));
  for (const id of [...state.colourOf.keys()]) if (!alive.has(id)) state.colourOf.delete(id);
  const total = state.donors.reduce((sum, donor) => sum + donor.token_count, 0);
  $("donor-count").textContent = state.donors.length ? `${number(state.donors.length)} · ${tokens(total)}` : "";
  $("forget-all").hidden = state.donors.length === 0;
  $("donors").replaceChildren(...state.donors.slice(0, 200).map(donorCard));
}

function donorCard(donor) {
  const about = donor.tenant ? `${tokens(donor.token_count)} · tenant ${donor.tenant}` : tokens(donor.token_count);
  return el("li", { title: donor.donor_id },
    el("span", { class: "swatch", colour: colour(donor.donor_id) }),
    el("b", {}, donor.donor_id),
    el("button", { class: "quiet danger", type: "button", "aria-label": `Forget donor ${donor.donor_id}`, onclick: guarded(() => forget(donor)) }, "forget"),
    el("p", {}, el("span", {}, about), ` ${donor.preview ?? "registered elsewhere: its text is not kept"}`));
}

const donorPath = (id) => `/api/donors/${encodeURIComponent(id)}`;

async function forget(donor) {
  await api("DELETE", donorPath(donor.donor_id));
  await refresh();
}

async function forgetAll() {
  for (const donor of state.donors) await api("DELETE", donorPath(donor.donor_id));
}

async function refresh() {
  await loadDonors();
  if ($("prompt").value) await explain();
  if ($("events-box").open) await loadEvents();
}

async function addDonor(event) {
  event.preventDefault();
  const body = { text: $("donor-text").value, donor_id: $("donor-id").value, tenant: $("donor-tenant").value };
  await api("POST", "/api/donors", body);
  $("donor-text").value = $("donor-id").value = "";
  await refresh();
}

// ---- examples --------------------------------------------------------------------------------------------

const exampleDonors = new Set();

async function loadExamples() {
  const { examples } = await api("GET", "/api/examples");
  for (const example of examples) for (const donor of example.donors) exampleDonors.add(donor.donor_id);
  const buttons = examples.map((example) =>
    el("button", { type: "button", "aria-pressed": "false", "data-key": example.key, onclick: guarded(() => show(example)) },
      example.title, el("small", {}, example.about)));
  $("examples").replaceChildren(...buttons);
  const wanted = examples.find((example) => example.key === location.hash.slice(1));
  if (wanted) await show(wanted);
}

async function show(example) {
  for (const button of $("examples").children) {
    button.setAttribute("aria-pressed", String(button.dataset.key === example.key));
  }
  for (const { donor_id: id } of state.donors) { // other examples' donors go, those that a person added stay
    if (exampleDonors.has(id)) await api("DELETE", donorPath(id));
  }
  for (const donor of example.donors) await api("POST", "/api/donors", donor);
  $("prompt").value = example.prompt;
  $("tenant").value = "";
  history.replaceState(null, "", `#${example.key}`);
  await refresh();
}

// ---- explain ---------------------------------------------------------------------------------------------

async function explain() {
  const text = $("prompt").value;
  if (!text) throw new Error("the prompt is empty");
  const turn = ++state.asked;
  const result = await api("POST", "/api/explain", { text, tenant: $("tenant").value });
  if (turn !== state.asked) return; // a newer question is on its way
  state.result = result;
  $("empty").hidden = true;
  $("result").hidden = false;
  drawVerdict(result);
  drawText(result);
  drawSpans(result);
  drawStages(result);
  strip.show(result);
  $("json").textContent = JSON.stringify(result.explanation, null, 2);
}

const spansOf = (result) => result.explanation.decision.spans ?? [];

function drawVerdict(result) {
  const total = result.owners.length;
  const reused = result.owners.filter((owner) => owner !== null).length;
  const prefix = result.prefix_tokens;
  const decision = result.explanation.decision;
  $("prompt-size").textContent = tokens(total);
  $("share").replaceChildren(String(percent(reused, total)), el("small", {}, "%"));
  if (reused) {
    $("verdict").textContent = "of this prompt is held by donors";
    const donors = result.donor_ids.length;
    $("verdict-detail").textContent = `${tokens(reused)} from ${donors} donor${donors === 1 ? "" : "s"}; the engine would prefill the other ${number(total - reused)}.`;
  } else {
    $("verdict").textContent = `Nothing to reuse: ${String(decision.reason ?? "").replaceAll("_", " ")}`;
    $("verdict-detail").textContent = decision.detail || "Every token must be prefilled.";
  }
  const tiles = [["reused", number(reused)], ["to prefill", number(total - reused)], ["spans", number(spansOf(result).length)], ["lookup", ms(result.timing.lookup_ms)]];
  $("tiles").replaceChildren(...tiles.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  const bars = [bar("Any-offset reuse", total, spansOf(result), reused)];
  if (prefix !== null) bars.unshift(bar("Exact-prefix cache", total, [{ target_start: 0, length: prefix, donor_id: null }], prefix));
  $("bars").replaceChildren(...bars);
}

function bar(name, total, spans, reused) {
  const svgns = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(svgns, "svg");
  svg.setAttribute("viewBox", `0 0 ${total} 1`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${name}: ${percent(reused, total)} % of the prompt`);
  for (const span of spans) {
    const rect = document.createElementNS(svgns, "rect");
    for (const [key, value] of Object.entries({ x: span.target_start, y: 0, width: span.length, height: 1 })) rect.setAttribute(key, value);
    rect.style.setProperty("--c", span.donor_id === null ? "var(--dim)" : colour(span.donor_id));
    svg.append(rect);
  }
  return el("div", { class: "bar" }, el("span", {}, name), svg, el("b", {}, `${percent(reused, total)} %`));
}

/** The prompt as text: one mark per span, and what no donor holds between them. */
function drawText(result) {
  const parts = [];
  let at = 0;
  const slice = (from, to) => result.pieces.slice(from, to).join("");
  spansOf(result).forEach((span, index) => {
    if (span.target_start > at) parts.push(el("span", { class: "cold" }, slice(at, span.target_start)));
    at = span.target_start + span.length;
    parts.push(el("mark", {
      colour: colour(span.donor_id), "data-span": index, title: `${span.donor_id}: ${tokens(span.length)} from position ${span.donor_start}`,
      onmouseenter: () => highlight(index, true), onmouseleave: () => highlight(index, false),
    }, slice(span.target_start, at)));
  });
  if (at < result.pieces.length) parts.push(el("span", { class: "cold" }, slice(at)));
  $("text").replaceChildren(...parts);
  const names = result.donor_ids.map((id) => el("span", {}, el("i", { colour: colour(id) }), id));
  $("legend").replaceChildren(...names, el("span", {}, el("i"), "must be prefilled"));
}

function drawSpans(result) {
  const spans = spansOf(result);
  $("span-count").textContent = spans.length ? `${spans.length}, in prompt order` : "none";
  const head = ["donor", "at", "from", "tokens", "shift"].map((name, at) => el("th", { class: at ? "num" : null, scope: "col" }, name));
  const rows = spans.slice(0, 500).map((span, index) => {
    const shift = span.target_start - span.donor_start;
    return el("tr", {
      "data-span": index, tabindex: "0", onmouseenter: () => highlight(index, true), onmouseleave: () => highlight(index, false),
      onfocus: () => highlight(index, true), onblur: () => highlight(index, false),
      onclick: () => scrollTo(index), onkeydown: (event) => event.key === "Enter" && scrollTo(index),
    },
    el("td", {}, el("i", { colour: colour(span.donor_id) }), el("span", { class: "id" }, span.donor_id)),
    el("td", { class: "num" }, number(span.target_start)), el("td", { class: "num" }, number(span.donor_start)),
    el("td", { class: "num" }, number(span.length)), el("td", { class: "num" }, shift > 0 ? `+${number(shift)}` : number(shift)));
  });
  $("spans").replaceChildren(el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows));
}

function highlight(index, on) {
  for (const node of document.querySelectorAll(`[data-span="${index}"]`)) node.classList.toggle("on", on);
}

function scrollTo(index) {
  const mark = $("text").querySelector(`[data-span="${index}"]`);
  $("text").scrollTo({ top: mark.offsetTop - $("text").offsetTop - 40, behavior: "smooth" });
}

function drawStages(result) {
  $("stage-total").textContent = `${ms(result.timing.lookup_ms)} in all, after ${ms(result.timing.tokenize_ms)} of tokenizing`;
  const facts = ({ name, ms: _, ...rest }) => Object.entries(rest).map(fact).filter(Boolean).join(" · ");
  const rows = result.explanation.stages.map((stage) => el("li", {}, el("time", {}, ms(stage.ms)), el("b", {}, stage.name), el("p", {}, facts(stage))));
  const alike = (result.explanation.decision.evidence ?? []).map((one) =>
    el("li", { class: "evidence" }, el("time", {}, one.similarity.toFixed(3)), el("b", {}, "looks alike"),
      el("p", {}, `${one.donor_id}, by ${one.source}. Evidence only: it allows nothing.`)));
  $("stages").replaceChildren(...rows, ...alike);
}

function fact([name, value]) {
  if (value === null || value === "") return "";
  const words = name.replaceAll("_", " ");
  if (typeof value === "boolean") return value ? words : `not ${words}`;
  return typeof value === "number" ? `${number(value)} ${words}` : `${words}: ${value}`;
}

// ---- events, theme, wiring -------------------------------------------------------------------------------

async function loadEvents() {
  const { events } = await api("GET", "/api/events");
  const row = (event) => el("tr", {}, el("td", {}, new Date(event.time_unix_s * 1000).toLocaleTimeString()), el("td", {}, event.event), el("td", {}, eventDetail(event)));
  $("events").replaceChildren(el("tbody", {}, ...events.slice().reverse().map(row)));
}

function eventDetail(event) {
  const hidden = new Set(["schema_version", "time_unix_s", "event", "engine"]);
  const shown = Object.entries(event).filter(([name, value]) => !hidden.has(name) && value !== null && typeof value !== "object");
  return shown.map(([name, value]) => `${name}=${value}`).join("  ").slice(0, 300);
}

function switchTheme() {
  const root = document.documentElement;
  const dark = getComputedStyle(root).colorScheme === "dark" || (root.dataset.theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("semblend-theme", root.dataset.theme);
  strip.draw();
}

async function health() {
  const now = await api("GET", "/health");
  $("health").className = "health ok";
  $("health").textContent = `version ${now.version} · tokenizer ${now.tokenizer}${now.store ? ` · store ${now.store}` : ""}`;
}

let pause = 0;
function typed() {
  clearTimeout(pause);
  if ($("live").checked && $("prompt").value) pause = setTimeout(guarded(explain), TYPING_PAUSE_MS);
}

document.documentElement.dataset.theme = localStorage.getItem("semblend-theme") ?? "auto";
$("theme").addEventListener("click", switchTheme);
$("donor-form").addEventListener("submit", guarded(addDonor));
$("forget-all").addEventListener("click", guarded(async () => { await forgetAll(); await refresh(); }));
$("explain").addEventListener("click", guarded(explain));
$("prompt").addEventListener("input", typed);
$("tenant").addEventListener("input", typed);
$("prompt").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) guarded(explain)(); });
$("donor-text").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("donor-form").requestSubmit(); });
$("events-box").addEventListener("toggle", guarded(() => ($("events-box").open ? loadEvents() : null)));

guarded(async () => {
  try {
    await health();
  } catch (error) {
    $("health").className = "health bad";
    $("health").textContent = "no answer";
    throw error;
  }
  await loadDonors();
  await loadExamples();
})();
