// The stream of figures: opened while the page is visible, reopened when it breaks.

const KEY = "sluice-key";
const view = {};
let stream = null;
let paused = false;
let searched = "";
let drawnMs = 0;

const WRONG_KEY =
  "This is no admin or viewer key of this gateway: those of server in its file, not a client's key. " +
  "A client sees its own limits and use with: sluice me";

class Refused extends Error {}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function answer(path, signal) {
  const found = await fetch(`dashboard/${path}`, { headers: headers(), signal, cache: "no-store" });
  if (found.ok) return found;
  const told = await found.json().catch(() => ({}));
  const message = found.status === 401 ? WRONG_KEY : told.error?.message || `the gateway answered ${found.status}`;
  throw found.status === 401 || found.status === 403 ? new Refused(message) : new Error(message);
}
const ask = async (path) => (await answer(path)).json();

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    let end;
    while ((end = held.indexOf("\n\n")) >= 0) {
      yield JSON.parse(held.slice(6, end)); // after "data: "
      held = held.slice(end + 2);
    }
  }
}

async function look() {
  stream?.abort();
  if (document.hidden || paused) return;
  const mine = (stream = new AbortController());
  for (let wait = 500; ; wait = Math.min(2 * wait, 10_000)) {
    try {
      if (Date.now() - drawnMs > 1000 * STEP_S) past = await (await answer("history", mine.signal)).json();
      const response = await answer(`events?${new URLSearchParams(view)}`, mine.signal);
      for await (const found of events(response)) {
        wait = 500;
        if (mine.signal.aborted) return;
        draw(found);
      }
    } catch (error) {
      if (mine.signal.aborted) return;
      if (error instanceof Refused) return login(error.message);
      setStatus(`not reached, trying again: ${error.message}`, "off");
    }
    await new Promise((go) => setTimeout(go, wait));
    if (mine.signal.aborted) return;
  }
}

function setStatus(text, kind) {
  setText(byId("status"), text);
  byId("status").className = `status ${kind}`;
}

function setView(name, value) {
  view[name] = value;
  if (!name.endsWith("_page")) delete view[`${name.split("_")[0]}_page`];
  look();
}
const soon = (work) => {
  let timer;
  return (value) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(value), 200);
  };
};

const entitlements = new Table("entitlements", {
  place: "entitlement-table", title: "entitlements", columns: ENTITLEMENTS, paged: true, hint: "name, tenant, class",
  orders: [["load", "most in flight"], ["refused", "most refused"], ["debt", "most debt"], ["priority", "highest priority"], ["name", "name"]],
  search: soon((text) => setView("entitlements", text)),
});
const tenants = new Table("tenants", {
  place: "tenant-table", title: "tenants and keys", columns: TENANTS, paged: true, hint: "tenant begins with",
  search: soon((text) => setView("tenants", text)),
});
const workers = new Table("workers", {
  place: "worker-table", title: "workers", columns: WORKERS, paged: true, hint: "worker, pool, state",
  orders: [["load", "most in flight"], ["state", "state"], ["name", "name"]],
  search: soon((text) => setView("workers", text)),
});
const decisions = new Table("decisions", {
  place: "decision-table", title: "decisions", columns: DECISIONS, hint: "id, tenant, reason, compressed",
  search: soon((text) => { searched = ""; setView("decisions", text); }),
});
decisions.tools.append(el("button", { type: "button", onclick: searchAll }, "Search all kept"));
const held = () => decisions.area.matches(":hover, :focus-within") && !view.decisions;

async function searchAll() {
  searched = view.decisions || "";
  try {
    const found = await ask(`decisions?${new URLSearchParams({ text: searched })}`);
    decisions.show(found);
    searched = searched || " ";
    setText(decisions.count, `${count(found.length)} found among all kept; type to go on live`);
  } catch (error) {
    setText(decisions.count, error.message);
  }
}

function draw({ shared, workers: w, entitlements: e, tenants: t, decisions: d }) {
  drawnMs = Date.now();
  remember(shared);
  byId("login").hidden = true;
  byId("figures").hidden = byId("pause").hidden = false;
  byId("forget").hidden = !sessionStorage.getItem(KEY);
  const replicas = shared.replicas > 1 ? `, ${shared.replicas} replicas` : "";
  setText(byId("about"), `${shared.version}${replicas}, ${count(shared.traffic.requests_total)} requests${shared.draining ? ", draining" : ""}`);
  const worst = shared.wrong.length === 0 ? "good" : shared.wrong.some((one) => one.level === "bad") ? "bad" : "warn";
  const verdict = { good: "nothing wrong", warn: "look below", bad: "needs you" }[worst];
  setStatus(`${verdict}, ${clock(shared.time)}`, { good: "live", warn: "warn", bad: "off" }[worst]);
  drawWrong(shared.wrong, worst);
  drawTraffic(shared.traffic);
  drawTargets(shared.targets);
  drawProof(shared.proof);
  drawBatches(shared.batches);
  byId("pool-cards").replaceChildren(...shared.pools.filter((pool) => pool.phase !== "prefill").map((pool) => poolCard(pool, shared.pools)));
  byId("model-cards").replaceChildren(...shared.models.map(modelCard));
  for (const id of ["tenants", "to-tenants"]) byId(id).hidden = t.total === 0;
  tenants.paged(t, false);
  entitlements.paged(e, shared.more_entitlements);
  workers.paged(w, false);
  if (!searched && !held()) {
    decisions.show(d);
    setText(decisions.count, `the newest ${count(d.length)}; they stand still while you point at them`);
  }
}

function login(problem) {
  stream?.abort();
  sessionStorage.removeItem(KEY);
  byId("figures").hidden = byId("pause").hidden = byId("forget").hidden = true;
  byId("login").hidden = false;
  setStatus("closed", "off");
  setText(byId("problem"), problem || "");
  byId("key").value = "";
  byId("key").focus();
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  look();
});
byId("forget").addEventListener("click", () => login(""));
byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  setText(byId("pause"), paused ? "Go on" : "Pause");
  if (paused) setStatus("paused", "");
  look();
});
document.addEventListener("visibilitychange", look);

const isOpen = document.querySelector('meta[name="sluice-open"]').content === "yes";
if (isOpen || sessionStorage.getItem(KEY)) look();
else login("");
const linked = location.hash.match(/^#request=(.+)$/);
if (linked && (isOpen || sessionStorage.getItem(KEY))) openStory(decodeURIComponent(linked[1]));
