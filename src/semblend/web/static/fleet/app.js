// The fleet page. No framework and no build step: data comes from /v1/fleet, text goes in as text nodes only.
import { $, drawMix, el, keepChildren, keepKey, ms, number, percent, put, showHealth, table, tokens, track, words } from "./dom.js";

const OUTCOMES = [["exact_prefix_route", "exact", "same beginning"], ["semantic_placement", "reused", "same passages"], ["cold_fallback", "prefill", "nothing known"]];
const LABELS = Object.fromEntries(OUTCOMES.map(([name, , label]) => [name, label]));
const COLOURS = Object.fromEntries(OUTCOMES.map(([name, colour]) => [name, `var(--${colour})`]));
const POLL_MS = 1500;
const BACK_OFF_MS = 5000;
const MOST_ROWS = 60;
const CLOSE = 0.05; // shares of a prompt that differ by less are alike

const state = { rows: new Map() };
state.key = keepKey("semantickv-key", (key) => {
  state.key = key;
  poll();
});

function row(name, value) {
  return [el("dt", {}, name), el("dd", {}, value)];
}

// ---- the parts of the page -------------------------------------------------------------------------------

function drawTotals(data) {
  const counts = OUTCOMES.map(([name]) => data.outcomes[name] ?? 0);
  const all = counts.reduce((sum, one) => sum + one, 0);
  put("placed", all ? `${percent(counts[0] + counts[1], all)}\u00a0%` : "–");
  drawMix(OUTCOMES.map(([name, , label], at) => [COLOURS[name], label, counts[at]]));
  const told = data.replicas.map((one) => one.reported).filter(Boolean);
  const prompt = told.reduce((sum, one) => sum + one.prompt_tokens, 0);
  const reused = told.reduce((sum, one) => sum + one.reused_tokens, 0);
  put("reused", prompt ? `${percent(reused, prompt)}\u00a0%` : "–");
  put("reused-note", prompt ? `${number(reused)} of ${tokens(prompt)}, as engines reported` : "no engine has reported");
  const running = data.replicas.reduce((sum, one) => sum + one.running, 0);
  const elsewhere = data.replicas.reduce((sum, one) => sum + one.running_elsewhere, 0);
  put("running", number(running));
  put("running-note", elsewhere ? `and ${number(elsewhere)} through other routers` : `${number(all)} placed since the start`);
  const up = data.replicas.filter((one) => one.up).length;
  put("up", String(up));
  put("up-note", up === data.replicas.length ? "up" : `of ${data.replicas.length} up`);
  put("policy", `${words(data.policy)}, engines reuse ${data.engine_reuse}`);
}

function drawReplica(one, busiest) {
  const [kind, health] = one.health === "down" ? ["down", "does not answer"] : one.health === "unknown" ? ["trial", "unknown: waits for an answer"] : one.breaker === "open" ? ["down", "left out after faults"] : one.breaker === "half_open" ? ["trial", "tried again"] : ["", "up"];
  const reported = one.reported;
  const faults = Object.entries(one.faults).map(([name, count]) => `${words(name)} ${count}`).join(", ");
  return el("article", { class: `replica ${kind}` },
    el("h3", {}, one.id, el("small", { title: one.url }, one.url)),
    track(busiest ? (one.running + one.running_elsewhere) / busiest : 0, "var(--accent)"),
    el("dl", {},
      ...row("health", health),
      ...row("running", one.running_elsewhere ? `${one.running} + ${one.running_elsewhere}` : String(one.running)),
      ...row("tokens waiting", number(one.waiting_tokens)),
      ...row("served", number(one.served)),
      ...row("reused", reported ? `${percent(reported.reused_tokens, reported.prompt_tokens)} %` : "not reported"),
      ...row("known", tokens(one.tracked_tokens)),
      ...(one.kv_events ? row("blocks by events", number(one.kv_events.blocks)) : []),
      ...(one.kv_events ? row("evictions heard", number(one.kv_events.evicted_pieces)) : []),
      ...(one.breaker === "closed" ? [] : row("breaker", words(one.breaker))),
      ...(faults ? row("faults", faults) : [])));
}

function drawDocuments(data) {
  if (!data.documents.length) {
    put("documents", el("p", { class: "none" }, "No document has come yet."));
    return;
  }
  const ids = data.replicas.map((one) => one.id);
  const heads = [["document"], ["tokens", "num"], ["requests", "num"], ...ids.map((id) => [id, "held"])];
  const held = (share) => el("td", { class: "held", vars: { w: share } }, share ? `${Math.round(100 * share)}\u00a0%` : "–");
  const rows = data.documents.map((one) => [el("code", {}, one.id), number(one.tokens), number(one.requests), ...ids.map((id) => held(one.held[id]))]);
  put("documents", el("table", {}, ...table(heads, rows)));
}

/** Why a request went where it went, in one sentence. */
function explain(one) {
  const share = `${Math.round(100 * (one.score ?? 0))} %`;
  if (one.reason === "session") return `its session lives on ${one.replica}, which has ${share} of the prompt`;
  if (one.reason === "only_one") return `only ${one.replica} could serve`;
  if (!one.prompt_tokens) return `${one.replica} was free; the prompt was not looked at`;
  const others = one.compared.filter((other) => other.replica !== one.replica);
  const best = others.reduce((most, other) => (other.known_tokens > (most?.known_tokens ?? 0) ? other : most), null);
  if (!one.score && !best) return `nobody has seen it; ${one.replica} had least to do`;
  const known = one.prompt_tokens - one.new_tokens;
  if (best && Math.abs(best.known_tokens - known) <= CLOSE * one.prompt_tokens) return `${one.replica} and ${best.replica} have ${share} of it; ${one.replica} had less to do`;
  if (best && best.known_tokens > known) return `${best.replica} has more of it, but is busier than that saves`;
  return `${one.replica} has ${share} of it${best ? `, ${best.replica} ${percent(best.known_tokens, one.prompt_tokens)} %` : ", nobody else any"}`;
}

const idOf = (one) => `${one.request_id}/${one.time_unix_s}`;

function drawDecisions(data) {
  const shown = data.decisions.slice(0, MOST_ROWS);
  state.rows = new Map(shown.map((one) => [idOf(one), drawDecision(one, state.rows.get(idOf(one)))]));
  for (const one of shown) {
    const age = Math.max(0, data.time_unix_s - one.time_unix_s);
    state.rows.get(idOf(one)).node.querySelector(".when").textContent = age < 90 ? `${Math.round(age)} s ago` : `${Math.round(age / 60)} min ago`;
  }
  keepChildren("decisions", [...state.rows.values()].map((row) => row.node));
  $("no-decisions").hidden = shown.length > 0;
}

/** A row keeps its node, so that it stays open and keeps the focus; it is written anew only where its data changed. */
function drawDecision(one, row) {
  const written = JSON.stringify(one);
  if (row?.written === written) return row;
  const node = row?.node ?? el("details", {}, el("summary"), el("div", { class: "detail" }));
  node.className = `decision fold ${one.status >= 400 ? "failed" : ""}`;
  node.firstChild.replaceChildren(
    el("span", { class: "when dim" }),
    el("span", {}, `→ ${one.replica ?? "nobody"}`),
    el("span", { class: "why" }, explain(one), one.arranged ? ", passages arranged" : ""),
    el("span", { class: "word", vars: { c: COLOURS[one.route] ?? "var(--prefill)" } }, LABELS[one.route] ?? words(one.route), el("small", {}, one.reuse ? `engine: ${words(one.reuse)}` : "")),
    el("span", { class: "num" }, one.status >= 400 ? String(one.status) : ms(one.ttft_ms)));
  const facts = `${one.request_id} · ${one.model} · ${tokens(one.prompt_tokens)} (estimated), ${number(one.new_tokens)} new`;
  node.lastChild.replaceChildren(...[compare(one), el("small", {}, facts)].filter(Boolean));
  return { node, written };
}

function compare(one) {
  if (!one.compared.length) return null;
  const heads = [["replica"], ["has of it", "num"], ["tokens waiting", "num"], ["running", "num"]];
  const rows = one.compared.map((other) => ({
    attributes: { class: other.replica === one.replica ? "chosen" : null },
    cells: [other.replica, tokens(other.known_tokens), number(other.waiting_tokens), number(other.running)],
  }));
  return el("table", {}, ...table(heads, rows));
}

function draw(data) {
  drawTotals(data);
  const busiest = Math.max(...data.replicas.map((one) => one.running + one.running_elsewhere));
  put("replicas", ...data.replicas.map((one) => drawReplica(one, busiest)));
  drawDocuments(data);
  drawDecisions(data);
}

// ---- the loop --------------------------------------------------------------------------------------------

async function poll() {
  let wait = POLL_MS;
  try {
    const answer = await fetch("/v1/fleet", { headers: state.key ? { Authorization: `Bearer ${state.key}` } : {} });
    $("key-form").hidden = answer.status !== 403;
    if (!answer.ok) throw new Error(answer.status === 403 ? "a key is needed" : `the router answered ${answer.status}`);
    draw(await answer.json());
    showHealth(true, "live");
  } catch (error) {
    wait = BACK_OFF_MS;
    showHealth(false, error.message);
  }
  clearTimeout(state.timer);
  state.timer = setTimeout(poll, wait);
}

poll();
