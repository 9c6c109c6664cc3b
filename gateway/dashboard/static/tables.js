// Long tables: the gateway sorts, searches and cuts them; this page shows one cut.

class Table {
  // columns: [title, kind, (row) => text or node], kind "number", "name", "wide" or several.
  constructor(name, { place, title, columns, orders, search, paged, hint }) {
    this.columns = columns;
    this.body = el("tbody");
    this.count = el("span", { class: "count", role: "status" });
    this.keys = [];
    const tools = [el("label", {}, `Search ${title}`, el("input", { type: "search", maxlength: 128, placeholder: hint, oninput: (e) => search(e.target.value) }))];
    if (orders) {
      const options = orders.map(([value, label]) => el("option", { value }, label));
      tools.push(el("label", {}, `Order of ${title}`, el("select", { onchange: (e) => setView(`${name}_order`, e.target.value) }, options)));
    }
    this.tools = el("div", { class: "tools" }, tools, this.count);
    if (paged) {
      this.back = el("button", { type: "button", "aria-label": `Earlier ${title}`, onclick: () => this.turn(-1) }, "‹");
      this.next = el("button", { type: "button", "aria-label": `Further ${title}`, onclick: () => this.turn(1) }, "›");
      this.tools.append(this.back, this.next);
      this.turn = (by) => setView(`${name}_page`, this.page + by);
    }
    const heads = columns.map(([text, kind]) => el("th", { scope: "col", class: kind }, term(text)));
    const table = el("table", {}, el("thead", {}, el("tr", {}, heads)), this.body);
    this.area = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, table);
    byId(place).append(this.tools, this.area);
  }

  show(rows) {
    while (this.body.rows.length > rows.length) this.body.deleteRow(-1);
    rows.forEach((row, at) => {
      const line = this.body.rows[at] || this.body.appendChild(el("tr", {}, this.columns.map(([, kind]) => el("td", { class: kind }))));
      this.columns.forEach(([, , shown], i) => this.put(line.cells[i], shown(row)));
    });
  }

  put(cell, content) {
    const { text, node, kind, title } = typeof content === "string" ? { text: content } : content;
    const key = JSON.stringify([text, kind, title]);
    if (cell.sluiceKey === key) return;
    cell.sluiceKey = key;
    cell.replaceChildren(node ? node() : el("span", { class: kind, title }, text));
  }

  paged(found, more) {
    this.page = found.page;
    this.show(found.rows);
    const all = `${count(found.total)}${more ? " oldest" : ""}`;
    setText(this.count, found.found === found.total ? `${all}, page ${found.page + 1} of ${found.pages}` : `${count(found.found)} of ${all}, page ${found.page + 1} of ${found.pages}`);
    this.back.disabled = found.page === 0;
    this.next.disabled = found.page >= found.pages - 1;
  }
}

const STATES = { up: "good", bound: "good", draining: "warn", ejected: "warn", pending: "warn", degraded: "bad", down: "bad", suspended: "warn", expired: "warn" };
const state = (text, why) => ({ text: why ? `${text}: ${why}` : text, kind: STATES[text], title: why });
const share = (part, label) => (part == null ? NONE : { text: percent(part), node: () => el("span", {}, meter(part, label), percent(part)) });
const reasons = (row) => Object.entries(row.refused_by).sort((a, b) => b[1] - a[1]).map(([why, times], _, all) => (all.length > 1 ? `${why} ${count(times)}` : why)).join(", ");
const met = (row) => (!row.slo_ms ? NONE : { text: `${percent(row.attainment)} in ${count(row.slo_ms)} ms`, kind: row.attainment == null ? undefined : row.attainment >= 0.99 ? "good" : row.attainment >= 0.95 ? "warn" : "bad" });

const paced = (row) => (!row.slo_tpot_ms ? NONE : { text: `${percent(row.tpot_attainment)} in ${decimal(row.slo_tpot_ms)} ms`, kind: row.tpot_attainment == null ? undefined : row.tpot_attainment >= 0.99 ? "good" : row.tpot_attainment >= 0.95 ? "warn" : "bad" });

const named = (parts, all) => parts.join(", ") + (all > parts.length ? ` and ${count(all - parts.length)} more` : "");
const keyNames = (r) => named(r.keys.map((k) => (k.state === "live" ? k.name : `${k.name} (${k.state})`)), r.key_count) || NONE;
const rights = (r) => named(r.entitlements.map((e) => (e.limit ? `${e.name} ${count(e.inflight)}/${count(e.limit)}` : `${e.name} ${count(e.inflight)}`)), r.entitlement_count) || NONE;
const TENANTS = [
  ["Tenant", "name", (r) => ({ text: r.name, title: r.display_name || r.name })],
  ["State", "", (r) => (r.suspended ? state("suspended") : NONE)],
  ["Keys", "name reasons", (r) => ({ text: keyNames(r), title: keyNames(r) })],
  ["Entitlements, in flight", "name reasons", (r) => ({ text: rights(r), title: rights(r) })],
  ["Of limit", "", (r) => share(r.limit ? r.inflight / r.limit : null, "In flight of the limit")],
  ["Tokens used", "number", (r) => (r.used_tokens == null ? NONE : count(r.used_tokens))],
  ["Refused", "number", (r) => (r.refused ? { text: count(r.refused), kind: "warn" } : "0")],
];

const refused = (r) => sum(Object.values(r.refused_by));
const bucket = (r) => share(r.account.depth_tokens ? 1 - r.account.level_tokens / r.account.depth_tokens : 1, "Bucket used");
const ENTITLEMENTS = [
  ["Entitlement", "name", (r) => ({ text: r.name, title: r.name })],
  ["Tenant", "name wide", (r) => ({ text: r.tenant, title: r.tenant })],
  ["Class", "", (r) => r.service_class],
  ["State", "", (r) => state(r.account?.state || NONE)],
  ["In flight", "number", (r) => count(r.inflight)],
  ["Refused", "name reasons", (r) => (refused(r) ? { text: `${count(refused(r))}: ${reasons(r)}`, kind: "warn", title: reasons(r) } : "0")],
  ["Baseline / limit", "number", (r) => `${count(sum(r.baseline) || null)} / ${count(r.limit || null)}`],
  ["Tokens/s", "number", (r) => count(r.tokens_per_s || null)],
  ["Bucket used", "wide", (r) => (r.account && r.tokens_per_s ? bucket(r) : NONE)],
  ["KV reserved", "number wide", (r) => (r.kv_limit ? `${bytes(r.account?.kv_bytes)} / ${bytes(r.kv_limit)}` : bytes(r.account?.kv_bytes))],
  ["Used tokens", "number wide", (r) => count(r.account?.used)],
  ["Debt", "number", (r) => decimal(r.account?.debt)],
  ["Priority", "number", (r) => decimal(r.account?.weight)],
  ["SLO met", "number", met],
  ["Pace met", "number", paced],
];
const WORKERS = [
  ["Worker", "name", (r) => ({ text: r.id, title: r.id })],
  ["Pool", "", (r) => r.pool],
  ["Model", "name wide", (r) => ({ text: r.model, title: r.model })],
  ["State", "name", (r) => state(r.state, r.not_ready)],
  ["In flight", "", (r) => ({ text: `${r.active_sequences}/${r.slots}`, node: () => el("span", {}, meter(r.slots ? r.active_sequences / r.slots : null, "In flight"), `${count(r.active_sequences)} of ${count(r.slots)}`) })],
  ["Reserved tokens", "number", (r) => count(r.reserved_tokens)],
  ["KV used", "", (r) => share(r.kv, "KV used")],
  ["Prefix hits", "number", (r) => percent(r.hit_rate)],
  ["Speed", "number", (r) => (r.slowness == null ? NONE : `${decimal(1 / r.slowness)}×`)],
];
const DECISIONS = [
  ["Time", "", (r) => clock(r.time)],
  ["Request", "name", (r) => ({ text: r.id, node: () => el("button", { type: "button", class: "link", onclick: () => openStory(r.id) }, r.id) })],
  ["Outcome", "", (r) => ({ text: r.outcome === "ok" ? "ok" : `${r.outcome} ${r.status}`, kind: r.outcome === "ok" ? "good" : r.outcome === "refused" ? "warn" : "bad" })],
  ["Reason", "", (r) => r.reason || (r.compressed !== "none" ? `compressed ${r.compressed.replace("->", " → ")}` : r.spilled ? "spilled" : NONE)],
  ["Entitlement", "name", (r) => ({ text: r.entitlement || NONE, title: r.entitlement })],
  ["Pool", "", (r) => r.pool || NONE],
  ["Worker", "name wide", (r) => ({ text: (r.prefill_worker ? `${r.prefill_worker} → ` : "") + (r.worker || NONE), title: r.prefill_worker ? "prefill → decode" : r.worker })],
  ["Estimate", "number wide", (r) => count(r.tokens)],
  ["Queue", "number", (r) => (r.queue_ms ? seconds(r.queue_ms / 1000) : NONE)],
  ["TTFT", "number", (r) => seconds(r.ttft)],
  ["Duration", "number", (r) => seconds(r.seconds)],
];
