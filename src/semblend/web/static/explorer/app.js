// The explorer's page. No framework and no build step: data comes from /api, text goes in as text nodes only.
import { $, clock, el, ms, number, percent, plural, put, showHealth, table, tokens, words } from "./dom.js";
import { drawBar, TokenStrip } from "./strip.js";

const COLOURS = 8;
const TYPING_PAUSE_MS = 250;
const MOST_STRIP_HEIGHT = 190;

const state = { donors: [], colourOf: new Map(), result: null, asked: 0 };
const strip = new TokenStrip($("strip-box"), $("strip-note"), MOST_STRIP_HEIGHT);

// ---- small helpers ---------------------------------------------------------------------------------------

async function api(method, path, body) {
  const init = { method };
  if (body) Object.assign(init, { headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  let answer;
  try {
    answer = await fetch(path, init);
  } catch {
    throw new Error("the explorer does not answer; is semblend explore still running?");
  }
  const data = await answer.json();
  if (!answer.ok) throw new Error(data.hint ? `${data.error}. ${data.hint}` : data.error);
  return data;
}

/** A donor keeps its colour for as long as it lives, whatever the order of use. */
function colour(donorId) {
  if (donorId === null || donorId === undefined) return "var(--prefill)";
  if (!state.colourOf.has(donorId)) {
    const taken = new Set(state.colourOf.values());
    let free = 0;
    while (free < COLOURS && taken.has(free)) free += 1;
    state.colourOf.set(donorId, free < COLOURS ? free : state.colourOf.size % COLOURS);
  }
  return `var(--d${state.colourOf.get(donorId)})`;
}

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
    el("span", { class: "swatch", vars: { c: colour(donor.donor_id) } }),
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
  drawStrip(result);
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
    $("verdict-detail").textContent = `${tokens(reused)} from ${plural(result.donor_ids.length, "donor")}; the engine would prefill the other ${number(total - reused)}.`;
  } else {
    $("verdict").textContent = `Nothing to reuse: ${words(decision.reason)}`;
    $("verdict-detail").textContent = decision.detail || "Every token must be prefilled.";
  }
  const facts = [["reused", number(reused)], ["to prefill", number(total - reused)], [spansOf(result).length === 1 ? "span" : "spans", number(spansOf(result).length)], ["lookup", ms(result.timing.lookup_ms)]];
  put("facts", ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  const bars = [bar("Any-offset reuse", total, partsOf(result), reused)];
  if (prefix !== null) bars.unshift(bar("Exact-prefix cache", total, [[0, prefix, "var(--dim)"]], prefix));
  put("bars", ...bars);
}

function bar(name, total, parts, reused) {
  const share = `${percent(reused, total)} %`;
  return el("div", { class: "bar" }, el("span", {}, name), drawBar(total, parts, `${name}: ${share} of the prompt`), el("b", {}, share));
}

const partsOf = (result) => spansOf(result).map((span) => [span.target_start, span.target_start + span.length, colour(span.donor_id)]);

function drawStrip(result) {
  const count = result.owners.length;
  const reused = result.owners.filter((owner) => owner !== null).length;
  const describe = (index) => {
    const span = spansOf(result).find((one) => index >= one.target_start && index < one.target_start + one.length);
    const piece = result.pieces[index].replaceAll("\n", "⏎").replaceAll("\t", "⇥");
    return [`token ${index} `, el("code", {}, piece), span ? ` held by ${span.donor_id}, position ${span.donor_start + index - span.target_start}` : " must be prefilled"];
  };
  strip.show({ count, parts: partsOf(result), label: `${tokens(count)}, ${number(reused)} of them held by donors`, hint: "Hover or focus the strip to read single tokens.", describe });
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
      vars: { c: colour(span.donor_id) }, "data-span": index, title: `${span.donor_id}: ${tokens(span.length)} from position ${span.donor_start}`,
      onmouseenter: () => highlight(index, true), onmouseleave: () => highlight(index, false),
    }, slice(span.target_start, at)));
  });
  if (at < result.pieces.length) parts.push(el("span", { class: "cold" }, slice(at)));
  $("text").replaceChildren(...parts);
  const names = result.donor_ids.map((id) => el("span", {}, el("i", { vars: { c: colour(id) } }), id));
  $("legend").replaceChildren(...names, el("span", {}, el("i"), "must be prefilled"));
}

function drawSpans(result) {
  const spans = spansOf(result);
  $("span-count").textContent = spans.length ? `${spans.length}, in prompt order` : "none";
  const heads = [["donor"], ["at", "num"], ["from", "num"], ["tokens", "num"], ["shift", "num"]];
  const rows = spans.slice(0, 500).map((span, index) => {
    const shift = span.target_start - span.donor_start;
    const attributes = {
      "data-span": index, tabindex: "0", onmouseenter: () => highlight(index, true), onmouseleave: () => highlight(index, false),
      onfocus: () => highlight(index, true), onblur: () => highlight(index, false),
      onclick: () => scrollTo(index), onkeydown: (event) => event.key === "Enter" && scrollTo(index),
    };
    const donor = el("td", {}, el("i", { vars: { c: colour(span.donor_id) } }), el("span", { class: "id" }, span.donor_id));
    return { attributes, cells: [donor, ...[span.target_start, span.donor_start, span.length].map(number), shift > 0 ? `+${number(shift)}` : number(shift)] };
  });
  put("spans", ...table(heads, rows));
}

function highlight(index, on) {
  for (const node of document.querySelectorAll(`[data-span="${index}"]`)) node.classList.toggle("on", on);
}

function scrollTo(index) {
  const mark = $("text").querySelector(`[data-span="${index}"]`);
  $("text").scrollTo({ top: mark.offsetTop - $("text").offsetTop - 40, behavior: "smooth" });
}

function drawStages(result) {
  const total = result.explanation.stages.reduce((sum, stage) => sum + stage.ms, 0);
  $("stage-total").textContent = `${ms(total)} in all, timed stage by stage in a lookup of its own · tokenizing ${ms(result.timing.tokenize_ms)}`;
  const facts = ({ name, ms: _, ...rest }) => Object.entries(rest).map(fact).filter(Boolean).join(" · ");
  const rows = result.explanation.stages.map((stage) => el("li", {}, el("time", {}, ms(stage.ms)), el("b", {}, stage.name), el("p", {}, facts(stage))));
  const alike = (result.explanation.decision.evidence ?? []).map((one) =>
    el("li", { class: "evidence" }, el("time", {}, one.similarity.toFixed(3)), el("b", {}, "looks alike"),
      el("p", {}, `${one.donor_id}, by ${one.source}. Evidence only: it allows nothing.`)));
  $("stages").replaceChildren(...rows, ...alike);
}

function fact([name, value]) {
  if (value === null || value === "") return "";
  if (typeof value === "boolean") return value ? words(name) : `not ${words(name)}`;
  return typeof value === "number" ? `${words(name)} ${value.toLocaleString("en")}` : `${words(name)}: ${value}`;
}

// ---- events, wiring -------------------------------------------------------------------------------------

async function loadEvents() {
  const { events } = await api("GET", "/api/events");
  const row = (event) => [clock(event.time_unix_s), event.event, el("td", { class: "facts-of" }, eventDetail(event))];
  if (events.length) put("events", ...table([["time"], ["event"], ["facts"]], events.slice().reverse().map(row)));
  else put("events", el("caption", { class: "none" }, "None yet: a lookup or a new donor makes the first."));
}

function eventDetail(event) {
  const hidden = new Set(["schema_version", "time_unix_s", "event", "engine"]);
  const shown = Object.entries(event).filter(([name, value]) => !hidden.has(name) && value !== null && typeof value !== "object");
  return shown.map(([name, value]) => `${name}=${value}`).join("  ").slice(0, 300);
}

async function health() {
  const now = await api("GET", "/health");
  showHealth(true, `version ${now.version} · tokenizer ${now.tokenizer}${now.store ? ` · store ${now.store}` : ""}`);
}

let pause = 0;
function typed() {
  clearTimeout(pause);
  if ($("live").checked && $("prompt").value) pause = setTimeout(guarded(explain), TYPING_PAUSE_MS);
}

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
    showHealth(false, "no answer");
    throw error;
  }
  await loadDonors();
  await loadExamples();
})();
