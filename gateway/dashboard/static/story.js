// The story of one request: its steps in time, each with a sentence, and its whole record.

async function openStory(id) {
  const dialog = byId("story");
  setText(byId("story-title"), `Request ${id}`);
  byId("story-body").replaceChildren(el("p", {}, "Asking the gateway …"));
  if (!dialog.open) dialog.showModal();
  history.replaceState(null, "", `#request=${encodeURIComponent(id)}`);
  try {
    const found = await ask(`decisions/${encodeURIComponent(id)}`);
    byId("story-body").replaceChildren(...storyOf(found));
  } catch (error) {
    byId("story-body").replaceChildren(el("p", { class: "bad" }, String(error.message || error)));
  }
}

function storyOf({ steps, record }) {
  const total = Math.max(...steps.map((step) => (step.start_ms || 0) + (step.duration_ms || 0)), 1e-3);
  const lines = steps.map((step) => {
    const reached = step.start_ms != null;
    const bar = el("div", { class: "bar", "aria-hidden": "true" });
    if (reached) {
      const part = el("span");
      part.style.left = `${Math.min(99, (100 * step.start_ms) / total)}%`;
      part.style.width = `${(100 * (step.duration_ms || 0)) / total}%`;
      bar.append(part);
    }
    const took = step.duration_ms == null ? NONE : step.name === "settle" ? `at ${seconds(step.start_ms / 1000)}` : seconds(step.duration_ms / 1000);
    return el("li", {}, el("strong", {}, step.name), el("span", { class: "when" }, took), bar, el("span", { class: "text" }, step.text));
  });
  const when = new Date(1000 * record.time_unix_s).toISOString();
  return [
    el("p", { class: "muted" }, `Arrived at ${when}. Estimate, plan and admission share one bar: together they are the gateway's work.`),
    el("ol", { class: "steps" }, lines),
    el("details", {}, el("summary", {}, "The whole record"), el("pre", { tabindex: 0 }, JSON.stringify(record, null, 2))),
  ];
}

byId("story-close").addEventListener("click", () => byId("story").close());
byId("story").addEventListener("close", () => history.replaceState(null, "", location.pathname));
