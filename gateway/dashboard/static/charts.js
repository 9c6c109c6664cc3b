// The last 15 minutes: tiles, cards of pools, time to first token against targets; lengths.

const WINDOW_S = 900;
const STEP_S = 8; // the gateway keeps a point every 9 to 10 s
let past = []; // figures, oldest first: the gateway's own history, then one in ten of its frames

function remember(shared) {
  if (past.length > 1 && shared.time - past.at(-2).time < STEP_S) past.pop();
  past.push(shared);
  while (shared.time - past[0].time > WINDOW_S) past.shift();
}

// One line of the remembered figures; `limit` is drawn, too.
function chart(read, { label = null, height = 24, limit = null, least = 1e-9 } = {}) {
  const values = past.map((then) => read(then) ?? null);
  const most = Math.max(limit ?? 0, ...values, least) * 1.1;
  const up = (value) => (height - 1 - ((height - 2) * value) / most).toFixed(1);
  const begin = past.at(-1).time - WINDOW_S;
  let path = "";
  values.forEach((value, i) => {
    if (value == null) return;
    const joined = i > 0 && values[i - 1] != null && past[i].time - past[i - 1].time < 4 * STEP_S;
    path += `${joined ? "L" : "M"}${(past[i].time - begin).toFixed(0)} ${up(value)}${joined ? "" : "h0.1"}`;
  });
  const drawn = [svg("path", { d: path })];
  if (limit != null) drawn.push(svg("path", { class: "limit", d: `M0 ${up(limit)}H${WINDOW_S}` }));
  const named = label ? { role: "img", "aria-label": label } : { "aria-hidden": "true" };
  return svg("svg", { class: "spark", viewBox: `0 0 ${WINDOW_S} ${height}`, height, preserveAspectRatio: "none", ...named }, drawn);
}

const TILES = [
  ["requests_per_s", "requests/s", (v) => decimal(v, 1)],
  ["refused_per_s", "refused/s", (v) => decimal(v, 1)],
  ["output_tokens_per_s", "answer tokens/s", count],
  ["ttft_p50_s", "TTFT p50", seconds],
  ["ttft_p99_s", "TTFT p99", seconds],
  ["overhead_p50_s", "overhead p50", seconds],
  ["overhead_p99_s", "overhead p99", seconds],
];

function drawTraffic(traffic) {
  byId("traffic").replaceChildren(...TILES.map(([name, label, shown]) =>
    el("div", { class: "card tile" }, el("div", { class: "label" }, label), el("div", { class: "value" }, shown(traffic[name])), chart((then) => then.traffic[name]))));
}

function targetCard({ entitlement, slo_ms: target, ttft_p50_s: median, ttft_p99_s: late }) {
  const kind = late == null ? "muted" : late * 1000 <= target ? "good" : median * 1000 <= target ? "warn" : "bad";
  const label = `TTFT p99 of ${entitlement} in 15 minutes, now ${seconds(late)}; target ${seconds(target / 1000)}`;
  const read = (then) => then.targets.find((one) => one.entitlement === entitlement)?.ttft_p99_s;
  return el("article", { class: "card" },
    el("div", { class: "line" }, el("h3", {}, entitlement), el("span", { class: kind }, `p99 ${seconds(late)} of ${seconds(target / 1000)}`)),
    chart(read, { label, height: 60, limit: target / 1000 }));
}

function drawTargets(targets) {
  const shown = targets.length ? targets : past.findLast((then) => then.targets.length)?.targets.map((one) => ({ ...one, ttft_p99_s: null })) ?? [];
  byId("targets").hidden = !shown.length;
  byId("target-cards").replaceChildren(...shown.map(targetCard));
}

const VERDICTS = { holds: "good", breaks: "bad", "cannot tell": "warn" };
const FEW = 400; // so many kept promises are needed to say that 99 % hold
const fine = (share) => `${(100 * share).toFixed(1)}%`;

// A claim that was simulated, and the share that was kept since, without refusals by own limits that are excused.
function claimLine(one, counts) {
  const counted = one.kind === "entitlement" ? counts[one.name] : null;
  const requests = counted ? sum(Object.values(counted)) : 0;
  const judged = counted ? requests - Math.min(counted.limited, one.excused * requests) : 0;
  const share = judged ? counted.kept / judged : null;
  const kind = judged < FEW ? "muted" : share < one.kept.low ? "bad" : "good";
  const since = share == null ? "no request since" : `since then ${fine(share)} of ${count(requests)}`;
  return el("li", { class: "line" },
    el("span", { title: one.reason }, `${one.kind} `, el("strong", {}, one.name), " ", el("span", { class: VERDICTS[one.verdict] }, one.verdict)),
    el("span", {}, `proved ${fine(one.kept.value)} (${fine(one.kept.low)} to ${fine(one.kept.high)})`, counted ? el("span", { class: kind }, `, ${since}`) : null));
}

let proofShown = "";
function drawProof(proof) {
  byId("proof").hidden = !proof;
  const told = JSON.stringify(proof);
  if (!proof || told === proofShown) return;
  proofShown = told;
  const [simulated, others] = [true, false].map((which) => proof.findings.filter((one) => (one.kept != null) === which));
  const names = others.map((one) => `${one.kind} ${one.name} (${one.verdict})`);
  if (proof.more) names.push(`${count(proof.more)} more`);
  byId("proof-card").replaceChildren(
    el("div", { class: "line" }, el("h3", {}, `Proof ${proof.id}: `, el("span", { class: VERDICTS[proof.verdict] }, proof.verdict)),
      el("span", { class: "muted" }, `attached ${new Date(1000 * proof.since_unix_s).toLocaleString("en-GB")}`)),
    el("ul", { class: "claims" }, simulated.map((one) => claimLine(one, proof.counts))),
    el("p", { class: "muted", hidden: !names.length }, `Not simulated: ${names.join(", ")}`));
}

const moment = (unix) => (unix == null ? NONE : new Date(1000 * unix).toLocaleString("en-GB"));
function batchLine(one) {
  const late = one.promised_by != null && (one.finish_p95 == null || one.finish_p95 > one.promised_by);
  const promise = one.promised_by == null ? "unpromised" : `promised by ${moment(one.promised_by)}`;
  const failed = one.failed ? `, ${count(one.failed)} failed` : "";
  return el("li", {}, el("code", {}, one.id), ` of ${one.tenant}, ${one.model}: ${one.status} `,
    meter(one.total ? one.done / one.total : 0, "Done"), ` ${count(one.done)} of ${count(one.total)}${failed}, ${promise}, `,
    el("span", { class: late ? "warn" : "good" }, `expected by ${moment(one.finish_p95)}`), one.message ? el("div", { class: "warn" }, one.message) : null);
}

let batchesShown = "";
function drawBatches(batches) {
  byId("batches").hidden = !batches.open;
  const told = JSON.stringify(batches);
  if (told === batchesShown) return;
  batchesShown = told;
  const more = batches.open - batches.rows.length;
  byId("batch-card").replaceChildren(el("ul", { class: "promises" }, batches.rows.map(batchLine)),
    el("p", { class: "muted", hidden: !more }, `${count(more)} more`));
}

let wrongShown = "";
function drawWrong(wrong, worst) {
  byId("wrong").className = `card verdict ${worst}-edge`;
  const told = JSON.stringify(wrong);
  if (told === wrongShown) return; // a screen reader hears of changes only
  wrongShown = told;
  const lines = wrong.length ? wrong : [{ level: "good", text: "Nothing: no worker is down, the store answers, and of the last minute's requests that are kept here none failed or met a spent budget." }];
  byId("wrong-list").replaceChildren(...lines.map((one) => el("li", { class: one.level }, one.text)));
}

const TERMS = {
  Queue: "Requests that wait in the gateway for a worker of this pool; in brackets by class: protected / elastic / backfill.",
  TTFT: "Time to first token of this pool's answers in the last minute: median, and 99th percentile.",
  Boundary: "Requests of up to so many tokens, prompt and answer, belong to this pool.",
  Window: "The longest sequence that its engines take.",
  "Desired replicas": "Workers that the present demand would need.",
  "Predictor coverage": "Share of first tokens that came within the predicted upper bound; 95 % is meant.",
  "KV cache reserved": "KV cache that requests in flight may need at most, of what the engines have.",
  Slots: "Sequences in flight, of those that the ready workers run at once.",
  Debt: "What an entitlement was refused of its baseline; it raises the priority of elastic work, and falls as it is served.",
  Priority: "The weight by which admission decides who gets the next slot; the higher goes first.",
  "SLO met": "Share of its streams whose first token came within `slo_target_ms`.",
  "Pace met": "Share of its streams whose mean time per token was within `slo_tpot_ms`.",
  "Bucket used": "Share of its token bucket that is spent; at 100 % requests wait for the rate.",
  "Baseline / limit": "Sequences set aside for it, and the most it may have in flight.",
  Refused: "Requests refused since the start, by reason.",
  Speed: "How fast this engine prefills compared with its pool.",
  "Prefix hits": "Share of prompt tokens that the engine found in its cache.",
  Estimate: "Tokens, prompt and answer, that the gateway expected.",
};
const term = (name) => (TERMS[name] ? el("abbr", { title: TERMS[name] }, name) : name);

const facts = (pairs) => el("dl", {}, pairs.flatMap(([name, value]) => [el("dt", {}, term(name)), el("dd", {}, value)]));

const readiness = (pool) => el("span", { class: pool.ready === pool.workers ? "good" : pool.ready ? "warn" : "bad" }, `${pool.ready} of ${pool.workers} ready`);
const before = (pool) => (then) => then.pools.find((one) => one.pool === pool.pool && one.model === pool.model);

// Slots of a pool, or of one of its phases, whose engines are then others.
function slotsOf(pool) {
  const slots = pool.ready_slots ? pool.inflight / pool.ready_slots : null;
  const name = pool.phase ? el("span", {}, el("strong", {}, pool.phase), " ", term("Slots"), " ", readiness(pool)) : el("span", {}, term("Slots"));
  return [
    el("div", { class: "line" }, name, el("span", {}, `${count(pool.inflight)} of ${count(pool.ready_slots)}`)),
    meter(slots, pool.phase ? `Slots of ${pool.phase} in use` : "Slots in use"),
    chart((then) => before(pool)(then)?.inflight, { least: pool.ready_slots }),
  ];
}

const moveOf = (move) => `Boundary ${move.made ? "moved" : "proposed"} ${count(Math.ceil(move.ago_s / 60))} min ago, ${count(move.before)} to ${count(move.after)} tokens: ${move.reason}`;

const queueOf = (pool) => (pool.queue ? `${count(sum(pool.queue))} (${pool.queue.join(" / ")})` : "0");

function poolCard(pool, all) {
  const first = pool.phase && all.find((one) => one.phase === "prefill" && one.model === pool.model && one.pool === `${pool.pool}/prefill`);
  const admission = pool.admission ?? {};
  const kv = admission.kv_capacity_bytes ? admission.kv_bytes / admission.kv_capacity_bytes : null;
  const rows = [
    ...(first ? [["Queue of prefill", queueOf(first)], ["Queue of decode", queueOf(pool)]] : [["Queue", queueOf(pool)]]),
    ["Boundary", pool.b_short == null ? "none, takes the rest" : `${count(pool.b_short)} tokens`],
    ["Window", `${count(pool.max_model_len)} tokens`],
    ["Desired replicas", count(admission.desired_replicas || null)],
    ["Predictor coverage", percent((first || pool).coverage)],
  ];
  return el("article", { class: "card" },
    el("div", { class: "line" }, el("h3", {}, `${pool.pool} `, el("span", { class: "muted" }, pool.model)),
      first ? el("span", { class: "muted" }, "in phases") : readiness(pool)),
    ...(first ? slotsOf(first) : []),
    ...slotsOf(pool),
    el("div", { class: "line" }, el("span", {}, term("KV cache reserved")), el("span", {}, kv == null ? NONE : `${bytes(admission.kv_bytes)} of ${bytes(admission.kv_capacity_bytes)}`)),
    kv == null ? null : meter(kv, "KV cache reserved"),
    el("div", { class: "line" }, el("span", {}, term("TTFT")), el("span", {}, pool.sampled ? `${seconds(pool.ttft_p50_s)}, p99 ${seconds(pool.ttft_p99_s)}` : NONE)),
    chart((then) => before(pool)(then)?.ttft_p50_s),
    facts(rows),
    pool.boundary_move ? el("p", { class: "move" }, moveOf(pool.boundary_move)) : null);
}

// Whether the plan still fits, by what this gateway knows. Planning is the command's.
function planOf(model) {
  const { plan, lengths } = model;
  const drift = !lengths.planned ? "not known, the file has no boundary.planned" : lengths.drift == null ? "not known yet" : `distance ${decimal(lengths.drift)}${plan.again ? ", over 0.1: plan again" : ", as planned"}`;
  const [start, asked, lost] = plan.busiest || [];
  const busiest = plan.busiest ? `${count(asked)} requests from ${new Date(1000 * start).toLocaleString([], { weekday: "short", hour: "2-digit", minute: "2-digit" })}, ${percent(lost / Math.max(1, asked))} not served` : NONE;
  const serves = /^[\w.:@\/-]+$/.test(model.model) ? model.model : `'${model.model.replaceAll("'", "'\\''")}'`;
  const line = (name, value) => el("li", {}, el("span", { class: "muted" }, `${name}: `), value);
  return el("ul", { class: "fits" },
    line("Lengths against the plan", drift),
    line(`Busiest of the ${count(plan.hours)} h known here`, busiest),
    line("To plan for this demand", el("code", {}, `sluice plan --live ${location.origin} --serves ${serves}`)));
}

function modelCard(model) {
  const packed = model.compression;
  const share = packed.candidates ? packed.compressed / packed.candidates : null;
  const why = Object.entries(packed.not_compressed).map(([reason, times]) => `${reason} ${count(times)}`);
  const rows = packed.enabled
    ? [
        ["Compressed of candidates", `${count(packed.compressed)} of ${count(packed.candidates)} (${percent(share)})`],
        ["Kept of the text, recently", percent(packed.kept_ratio)],
        ["Tokens saved, recently", count(packed.saved_tokens)],
        ["Not compressed", why.join(", ") || NONE],
      ]
    : [["Compression", "off"]];
  return el("article", { class: "card" },
    el("div", { class: "line" }, el("h3", {}, model.model), el("span", { class: "muted" }, model.mode)),
    el("div", { class: "model" }, histogram(model.lengths), el("div", {}, planOf(model), facts(rows))));
}

function histogram(lengths) {
  const columns = lengths.edges.length + 1;
  const [width, height, base] = [window.innerWidth < 720 ? 330 : 640, 170, 138];
  const step = width / columns;
  const sums = Array.from({ length: columns }, (_, i) => sum(lengths.pools.map((pool) => pool.counts[i])));
  const total = sum(sums);
  const planned = (lengths.planned || []).map((part) => part * total);
  const most = Math.max(...sums, ...planned, 1);
  const up = (n) => ((base - 12) * n) / most;
  const place = (tokens) => Math.min(width, Math.max(0, step * (1 + 2 * Math.log2(tokens / lengths.edges[0]))));
  const nodes = [];
  for (let i = 0; i < columns; i += 1) {
    let top = base;
    lengths.pools.forEach((pool, at) => {
      const tall = up(pool.counts[i]);
      top -= tall;
      if (tall) nodes.push(svg("rect", { class: `c${at % 4}`, x: (i * step + 1).toFixed(1), y: top.toFixed(1), width: (step - 2).toFixed(1), height: tall.toFixed(1) }));
    });
    if (i % (width < 640 ? 8 : 4) === 0 && i < columns - 2) nodes.push(svg("text", { x: ((i + 1) * step).toFixed(1), y: base + 14, "text-anchor": "middle" }, short(lengths.edges[i])));
  }
  if (planned.length && total) {
    const points = planned.flatMap((n, i) => [`${(i * step).toFixed(1)},${(base - up(n)).toFixed(1)}`, `${((i + 1) * step).toFixed(1)},${(base - up(n)).toFixed(1)}`]);
    nodes.push(svg("polyline", { class: "plan", points: points.join(" ") }));
  }
  lengths.boundaries.forEach((tokens) => {
    const x = place(tokens).toFixed(1);
    nodes.push(svg("line", { class: "edge", x1: x, x2: x, y1: 0, y2: base + 3 }));
    nodes.push(svg("text", { class: "edge", x, y: base + 28, "text-anchor": "middle" }, `boundary ${short(tokens)}`));
  });
  nodes.push(svg("line", { class: "axis", x1: 0, x2: width, y1: base, y2: base }));
  const names = lengths.pools.map((pool) => `${pool.name} ${count(sum(pool.counts))}`);
  const label = `Lengths of ${count(total)} recent requests by pool: ${names.join(", ")}`;
  const legend = lengths.pools.map((pool, at) => el("li", {}, svg("svg", { viewBox: "0 0 8 8", "aria-hidden": "true" }, svg("rect", { class: `c${at % 4}`, width: 8, height: 8 })), names[at]));
  if (lengths.planned) legend.push(el("li", {}, `- - planned${lengths.drift == null ? "" : `, distance ${decimal(lengths.drift)}`}`));
  legend.push(el("li", {}, "total tokens of recent requests"));
  return el("div", {}, svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, nodes), el("ul", { class: "legend" }, legend));
}

const short = (tokens) => (tokens >= 1024 ? `${Math.round(tokens / 1024)}K` : String(tokens));
