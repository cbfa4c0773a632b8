// The dashboard. No framework and no build step: data comes from /api, text goes in as text nodes only.
import { $, clock, drawMix, el, keepChildren, keepKey, ms, number, percent, plural, showHealth, tokens, track, words } from "./dom.js";
import { drawBar, TokenStrip } from "./strip.js";

const KINDS = [["exact", "exact prefix"], ["reused", "relocated"], ["recomputed", "recomputed"], ["prefill", "prefilled"]];
const WORDS = Object.fromEntries(KINDS);
const OUTCOMES = { backend_materialized_reuse: "reused", exact_prefix_route: "exact", backend_declined_reuse: "recomputed" };
const POLL_MS = 800;
const BACK_OFF_MS = 3000;
const MOST_ROWS = 60;
const MOST_CELLS_HEIGHT = 92;
const RISK_EDGES = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, Infinity];
const RISK_MARKS = [0.001, 0.01, 0.1]; // the edges that are written below the bars
const EXAMPLE = `The harbour of Veldmark keeps a small ferry for the three islands to its north. The boat takes forty passengers and, on weekdays, two cars; on Sundays the ramp stays shut and only people on foot may board. Tickets are sold at the green kiosk from half past six in the morning, and a return costs eleven crowns. Children under seven ride for nothing, and so do dogs that stay on the lower deck.

The first crossing leaves at seven, the last one comes back at twenty past nine in the evening. Between November and March the evening boat is cancelled when the wind is above force eight, and a lantern on the kiosk is lit in red as a sign. Whoever is stranded on an island may sleep in the lighthouse at Skarholm, which keeps twelve beds, blankets and a stove for that purpose; the key hangs behind the door of the bakery.

Freight is another matter. Crates up to thirty kilograms go on any crossing, heavier ones on Tuesdays, when the crane operator is on duty. Glass, bees and fireworks need a paper from the harbour office, which is open from nine until noon. The harbour master is Ilse Brandt; her deputy, Jon Okafor, answers the telephone in the afternoon. Complaints are read aloud at the council meeting on the first Monday of each month, and the kiosk sells coffee while the meeting lasts.

The islands differ more than their size suggests. Skarholm has the lighthouse, the bakery and a school with nine pupils, whose teacher rows to the mainland on Fridays for her own lessons in the cello. Little Orm is let to a sheep farmer, and visitors are asked to shut every gate behind them and to keep to the stone path, because the northern slope is undermined by rabbits. Great Orm, in spite of its name, is the smallest of the three; it holds a chapel, a bird station and a well whose water tastes of iron. Between April and June its beach is closed, since terns nest there, and the wardens count the eggs each week.

Winter has rules of its own. When the bay freezes, the ferry is laid up and the mail goes over the ice by sledge, on a track that is marked with birch branches every fifty paces. The ice is measured each morning by the deputy, in four places; below twelve centimetres nobody may cross, below twenty no horse. The last winter in which the bay froze for longer than a week was nine years ago, and the sledge now hangs from the ceiling of the bakery, where children try to touch its runners.`;

const state = { sequence: 0, requests: new Map(), rows: new Map(), ticks: 0, admin: false };
state.key = keepKey("semblend-key", (key) => {
  Object.assign(state, { key, sequence: 0 }); // another key sees other requests, under other numbers
  state.requests.clear();
  refresh().catch((error) => showHealth(false, error.message));
});

// ---- small helpers ---------------------------------------------------------------------------------------

const paint = (kind) => `var(--${kind})`;
const times = (ratio) => `${ratio < 10 ? ratio.toFixed(1) : Math.round(ratio)}×`;
/** How a first token compares with its cold estimate, as a factor of at least one and its word. */
const compare = (ratio) => [times(Math.max(ratio, 1 / ratio)), ratio < 1 ? "later" : "sooner"];
const median = (values) => (values.length ? values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)] : null);

async function call(path, init = {}) {
  const headers = { ...init.headers, ...(state.key ? { Authorization: `Bearer ${state.key}` } : {}) };
  const answer = await fetch(path, { ...init, headers });
  if (answer.status === 401) $("key-form").hidden = false;
  if (!answer.ok) throw new Error((await answer.json().catch(() => null))?.error?.message ?? `the server answered ${answer.status}`);
  $("key-form").hidden = true;
  return answer;
}

const api = async (path) => (await call(path)).json();

// ---- the live feed ---------------------------------------------------------------------------------------

async function poll() {
  let pause = POLL_MS;
  try {
    if (!document.hidden) await refresh();
  } catch (error) {
    showHealth(false, error instanceof TypeError ? "no answer" : error.message);
    pause = BACK_OFF_MS;
  }
  setTimeout(poll, pause);
}

async function refresh() {
  const news = await api(`/api/live?after=${state.sequence}`);
  if (news.sequence < state.sequence) { // the server started anew
    Object.assign(state, { sequence: 0 });
    state.requests.clear();
    return;
  }
  state.sequence = news.sequence;
  state.admin = news.admin;
  for (const request of news.requests) state.requests.set(request.id, request);
  showHealth(true, `${news.model}${news.tenant ? ` · tenant ${news.tenant}` : news.admin ? "" : " · no tenant"}`);
  drawTiles(news);
  drawSide(news.totals);
  drawPays(news.compared);
  if (news.requests.length && !$("hold").checked) drawRequests();
  if (news.requests.length || state.ticks++ % 5 === 0) await drawDonors();
}

function drawTiles(news) {
  const kinds = news.totals.tokens;
  const total = KINDS.reduce((sum, [kind]) => sum + kinds[kind], 0);
  $("share").textContent = total ? `${percent(kinds.exact + kinds.reused, total)} %` : "–";
  $("share-note").textContent = total ? `of ${number(total)} not computed` : "not computed";
  drawMix(KINDS.map(([kind, word]) => [paint(kind), word, kinds[kind]]));
  const moved = [...state.requests.values()].filter((one) => one.semblend?.reused_tokens); // an exact prefix needs none of us
  const ratios = moved.filter((one) => one.ttft_ms && one.cold_ttft_ms).map((one) => one.cold_ttft_ms / one.ttft_ms);
  const [factor, word] = ratios.length ? compare(median(ratios)) : ["–", "sooner"];
  $("speed").textContent = factor;
  $("speed-word").textContent = `${word} with reuse`;
  $("speed-note").textContent = ratios.length ? `median of ${ratios.length} with relocated tokens, against a cold estimate from ${plural(news.cold_samples, "request")}` : moved.length ? "no cold estimate yet: too few requests to compare with" : "nothing relocated yet";
  $("running").textContent = number(news.running);
  const states = news.totals.states;
  const parts = [`${number(states.done ?? 0)} done`, news.waiting ? `${number(news.waiting)} waiting` : null, states.failed ? `${number(states.failed)} failed` : null, states.cancelled ? `${number(states.cancelled)} abandoned` : null, news.refused ? `${number(news.refused)} refused` : null];
  $("requests-note").textContent = parts.filter(Boolean).join(" · ");
  $("donor-count").textContent = number(news.donors);
  $("donor-tokens").textContent = tokens(news.donor_tokens);
}

const speedKind = (request) => (request.semblend?.reused_tokens ? "reused" : request.semblend?.exact_tokens ? "exact" : "prefill");
const saved = (request) => (request.semblend ? request.semblend.exact_tokens + request.semblend.reused_tokens : 0);

function drawSide(totals) {
  counts("outcomes", totals.outcomes, (name) => paint(OUTCOMES[name] ?? "prefill"), "No request yet.");
  counts("declines", totals.declines, () => paint("prefill"), "Nothing was declined.");
  const bins = RISK_EDGES.map(() => 0);
  for (const risk of totals.risks) bins[RISK_EDGES.findIndex((edge) => risk <= edge)] += 1;
  const most = Math.max(1, ...bins);
  $("risk").hidden = $("risk-scale").hidden = totals.risks.length === 0;
  $("risk").replaceChildren(...bins.map((count, at) => el("i", { vars: { w: count / most, c: at < 4 ? paint("exact") : at < 6 ? paint("reused") : "var(--bad)" }, title: `${at ? RISK_EDGES[at - 1] : 0} to ${RISK_EDGES[at]}: ${count}` })));
  const sorted = totals.risks.toSorted((a, b) => a - b);
  $("risk-note").textContent = sorted.length ? `median ${sorted[Math.floor(sorted.length / 2)].toFixed(4)} · highest ${sorted.at(-1).toFixed(4)} · ${sorted.length} probed` : "Nothing was probed yet.";
}

/** Each kind of prompt with its interval: it pays where all of that is below 1, costs where all is above, else is not known yet. */
function drawPays(compared) {
  const colour = (one) => (one.high < 1 ? paint("exact") : one.low > 1 ? "var(--bad)" : paint("prefill"));
  const rows = compared.map((one) => el("div", {}, el("span", {}, one.kind), el("b", {}, `${one.ratio.toFixed(2)} (${one.low.toFixed(2)} to ${one.high.toFixed(2)})`), track(one.ratio, colour(one)),
    el("small", {}, `${ms(one.with_ms)} with (${number(one.with_count)}) · ${ms(one.without_ms)} without (${number(one.without_count)})`)));
  const none = state.admin ? "Too few requests of a kind were computed without reuse yet." : "Only an admin key shows it.";
  $("pays").replaceChildren(...(rows.length ? rows : [el("p", { class: "none" }, none)]));
}

function counts(id, table, colour, none) {
  const rows = Object.entries(table).sort((a, b) => b[1] - a[1]);
  const most = Math.max(1, ...rows.map((row) => row[1]));
  const bars = rows.map(([name, count]) => el("div", {}, el("span", {}, words(name)), el("b", {}, number(count)), track(count / most, colour(name))));
  $(id).replaceChildren(...(bars.length ? bars : [el("p", { class: "none" }, none)]));
}

async function drawDonors() {
  const { donors } = await api("/api/donors");
  const row = (donor) => el("li", {}, el("code", { title: donor.donor_id }, donor.donor_id), el("b", {}, number(donor.tokens)),
    el("small", {}, [clock(donor.created_unix_s), donor.tenant ? `tenant ${donor.tenant}` : null, donor.pinned ? "in use" : null].filter(Boolean).join(" · ")));
  $("donors").replaceChildren(...(donors.length ? donors.slice(0, 40).map(row) : [el("p", { class: "none" }, state.admin ? "None yet: the first cold request becomes one." : "Only an admin key shows them.")]));
}

// ---- requests as strips ----------------------------------------------------------------------------------

function drawRequests() {
  const latest = [...state.requests.values()].sort((a, b) => b.opened_unix_s - a.opened_unix_s);
  for (const old of latest.slice(200)) state.requests.delete(old.id);
  const shown = latest.slice(0, MOST_ROWS);
  const slowest = Math.max(1, ...shown.map((one) => Math.max(one.ttft_ms ?? 0, one.cold_ttft_ms ?? 0)));
  const rows = new Map(shown.map((request) => [request.id, row(request, slowest, state.rows.get(request.id))]));
  state.rows = rows;
  keepChildren("requests", [...rows.values()]);
  $("nothing").hidden = shown.length > 0;
}

/** A row keeps its node, so that an open receipt stays open while others arrive. */
function row(request, slowest, node) {
  const fresh = !node;
  node ??= el("details", {}, el("summary"), el("dl", { class: "receipt" }));
  node.className = `request ${request.state} fold${fresh ? " new" : ""}`;
  const outcome = request.semblend?.outcome;
  const about = request.semblend?.reason ?? (request.semblend?.reused_tokens ? [donorWords(request.semblend.donors), request.semblend.risk === null ? "" : `risk ${request.semblend.risk.toFixed(4)}`].filter(Boolean).join(" · ") : "");
  const word = request.state === "done" && outcome ? words(outcome).replace("backend ", "") : ended(request) || request.state;
  const colour = ["failed", "refused"].includes(request.state) ? "var(--bad)" : paint(OUTCOMES[outcome] ?? "prefill");
  node.firstChild.replaceChildren(
    el("span", { class: "when" }, clock(request.opened_unix_s), el("small", {}, state.admin && request.tenant ? request.tenant : request.endpoint.replace("/v1/", ""))),
    el("span", { class: "strip" }, drawBar(request.prompt_tokens, partsOf(request), labelOf(request)), el("small", {}, ...mixWords(request))),
    el("span", { class: "race" }, track((request.ttft_ms ?? 0) / slowest, paint(speedKind(request))), el("b", {}, ms(request.ttft_ms)),
      ...(saved(request) && request.cold_ttft_ms ? [track((request.cold_ttft_ms ?? 0) / slowest, paint("prefill")), el("b", { class: "estimate" }, ms(request.cold_ttft_ms))] : [])),
    el("span", { class: "word", vars: { c: colour } }, word, el("small", {}, request.error ? "see below" : request.state === "cancelled" ? "the client left" : words(about))));
  receipt(node.lastChild, request);
  return node;
}

/** How a request ended that has no whole answer; empty while it goes on, and where it has one. */
const ended = (request) => ({ cancelled: "abandoned", failed: "failed", refused: "refused" })[request.state] ?? "";

/** Only an operator is told the donors. */
const donorWords = (donors) => (donors ? plural(donors.length, "donor") : "");

function mixWords(request) {
  if (!request.semblend) return [[request.prompt_tokens ? tokens(request.prompt_tokens) : null, ended(request) || (request.prompt_tokens ? "at work…" : "in line…")].filter(Boolean).join(", ")];
  const of = { exact: request.semblend.exact_tokens, reused: request.semblend.reused_tokens, recomputed: request.semblend.recomputed_tokens, prefill: request.semblend.prefill_tokens };
  return KINDS.filter(([kind]) => of[kind]).map(([kind, word]) => el("span", {}, `${number(of[kind])} ${word}`));
}

const partsOf = (request) => request.strip.map(([start, end, kind]) => [start, end, paint(kind)]);
const labelOf = (request) => `${tokens(request.prompt_tokens)}, ${percent(saved(request), request.prompt_tokens)} % not computed`;

function receipt(list, request) {
  const of = request.semblend;
  const facts = [["request", request.id], ["prompt", tokens(request.prompt_tokens)], ["answer", tokens(request.output_tokens)], ["waited in line", ms(request.waited_ms)], ["in all", ms(request.total_ms)]];
  if (of) {
    facts.push(["not computed", `${percent(saved(request), request.prompt_tokens)} %`], ["mode", of.mode || "–"], ["risk", of.risk === null ? "not probed" : `${of.risk.toFixed(5)} nats`], ["escalations", String(of.escalations)], ["reason", words(of.reason) || "–"]);
    if (of.detail) facts.push(["detail", of.detail]);
    if (of.donors?.length) facts.push(["donors", of.donors.join(", ")]);
  }
  if (request.error) facts.push(["error", request.error]);
  list.replaceChildren(...facts.map(([name, value]) => el("div", { class: ["detail", "donors", "error", "request"].includes(name) ? "span" : null }, el("dt", {}, name), el("dd", {}, value))));
}

// ---- playground ------------------------------------------------------------------------------------------

function lane(which, question) {
  const parts = { size: el("span"), cells: el("div", { class: "strip-box", tabindex: "0", role: "img", "aria-label": "Token strip" }), race: el("div", { class: "race" }), answer: el("p", { class: "answer busy" }) };
  const box = $(`lane-${which}`);
  box.classList.remove("idle");
  box.replaceChildren(el("h3", {}, el("i", { class: "step" }, String(which)), question, parts.size), parts.cells, parts.race, parts.answer);
  return { ...parts, strip: new TokenStrip(parts.cells, $("cell-note"), MOST_CELLS_HEIGHT) };
}

/** An engine that tells how many tokens it recomputed, but not which, is drawn by share; say so. */
function hintOf(request) {
  if (request.places_known !== false) return "";
  return state.admin ? "The engine told how many tokens it recomputed, not which: they are drawn at the head of each span." : "Drawn by counts: only an admin key shows where the tokens lie.";
}

function showStrip(strip, request) {
  const describe = (index) => {
    const part = state.admin ? request.strip.find(([start, end]) => index >= start && index < end) : null;
    return part ? [`token ${number(index)}: ${WORDS[part[2]]}${part[3] === null ? "" : `, held by ${request.semblend.donors[part[3]]}`}`] : null; // drawn by counts, a cell is no particular token
  };
  strip.show({ count: request.prompt_tokens, parts: partsOf(request), label: labelOf(request), hint: hintOf(request), describe });
}

function idle() {
  for (const which of [1, 2]) {
    $(`lane-${which}`).classList.add("idle");
    $(`lane-${which}`).replaceChildren(el("div", { class: which === 1 ? "ghost cold" : "ghost" }), el("span", {}, which === 1 ? "The first question pays for the document." : "The second finds it at another place, and pays for the rest."));
  }
}

async function ask(which, options) {
  const question = $(`question-${which}`).value.trim();
  const text = $("document").value.trim();
  const into = lane(which, question);
  const content = options.before ? `${question}\n\n${text}` : `${text}\n\n${question}`;
  const body = { messages: [{ role: "user", content }], stream: true, temperature: 0, max_tokens: 96, semblend: { quality: options.quality }, cache_salt: options.salt };
  const answer = await call("/v1/chat/completions", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  let id = "";
  for await (const event of events(answer.body)) {
    if (event.error) throw new Error(event.error.message);
    id = event.id;
    into.answer.textContent += event.choices[0]?.delta?.content ?? "";
  }
  into.answer.classList.remove("busy");
  const request = await api(`/api/requests/${encodeURIComponent(id)}`);
  showStrip(into.strip, request);
  into.size.textContent = `${tokens(request.prompt_tokens)} · ${percent(saved(request), request.prompt_tokens)} % not computed`;
  return { request, into };
}

async function* events(stream) {
  let rest = "";
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const blocks = (rest + part.value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) if (block.startsWith("data: {")) yield JSON.parse(block.slice(6));
  }
}

function race(results) {
  const slowest = Math.max(1, ...results.map(({ request }) => Math.max(request.ttft_ms ?? 0, request.cold_ttft_ms ?? 0)));
  for (const { request, into } of results) {
    const lines = [el("span", {}, "first token"), track(request.ttft_ms / slowest, paint(speedKind(request))), el("b", {}, ms(request.ttft_ms))];
    if (saved(request) && request.cold_ttft_ms) lines.push(el("span", {}, "cold estimate"), track(request.cold_ttft_ms / slowest, paint("prefill")), el("b", {}, ms(request.cold_ttft_ms)));
    into.race.replaceChildren(...lines);
  }
}

function verdict({ request }) {
  const share = percent(saved(request), request.prompt_tokens);
  if (!share) return [`Nothing was reused: ${words(request.semblend?.reason) || "no shared tokens"}.`];
  const how = request.semblend.reused_tokens ? "taken from the first request and moved into place" : "an exact prefix of the first";
  const sooner = request.cold_ttft_ms && request.ttft_ms ? [", first token ", el("b", {}, compare(request.cold_ttft_ms / request.ttft_ms).join(" "))] : [];
  return [el("b", {}, `${share} %`), ` of the second prompt was ${how}`, ...sooner, "."];
}

async function askBoth() {
  $("problem").hidden = true;
  $("ask").disabled = true;
  $("verdict").replaceChildren();
  idle();
  try {
    if (!$("document").value.trim()) throw new Error("paste a document first");
    const options = { before: $("place").value === "before", quality: $("quality").value, salt: $("fresh").checked ? `playground-${crypto.getRandomValues(new Uint32Array(2)).join("-")}` : null };
    const first = await ask(1, options);
    race([first]);
    const second = await ask(2, options);
    race([first, second]);
    $("verdict").replaceChildren(...verdict(second));
  } catch (error) {
    for (const node of document.querySelectorAll(".answer.busy")) node.classList.remove("busy");
    $("problem").textContent = error.message;
    $("problem").hidden = false;
  }
  $("ask").disabled = false;
}

// ---- wiring ----------------------------------------------------------------------------------------------

const sized = () => { $("document-size").textContent = `${number($("document").value.length)} characters`; };

$("document").value = EXAMPLE;
$("question-1").value = "What does a return ticket cost?";
$("question-2").value = "Where may a stranded passenger sleep?";
$("document").addEventListener("input", sized);
$("ask").addEventListener("click", askBoth);
$("hold").addEventListener("change", () => { if (!$("hold").checked) drawRequests(); });
for (const id of ["document", "question-1", "question-2"]) $(id).addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) askBoth(); });
$("risk-scale").replaceChildren(...RISK_EDGES.map((edge) => el("span", {}, RISK_MARKS.includes(edge) ? String(edge) : "")));
sized();
idle();
poll();
if (location.hash === "#demo") askBoth(); // a link that shows it all without a click
