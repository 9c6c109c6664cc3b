// The OpenAPI document as a page: one part for each operation, with an example to copy.

function exampleOf(schema) {
  if (!schema) return null;
  if (schema.const !== undefined) return schema.const;
  if (schema.enum) return schema.enum[schema.enum.length - 1];
  if (schema.anyOf) return exampleOf(schema.anyOf[0]);
  if (schema.type === "object") {
    const wanted = new Set(schema.required || []);
    const parts = Object.entries(schema.properties || {}).filter(([name]) => wanted.has(name));
    return Object.fromEntries(parts.map(([name, part]) => [name, exampleOf(part)]));
  }
  if (schema.type === "array") return [exampleOf(schema.items)];
  return { string: "text", integer: 64, boolean: true }[schema.type] ?? null;
}

function typeOf(schema) {
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" or ");
  if (schema.type === "array") return `list of ${typeOf(schema.items)}`;
  return schema.enum ? schema.enum.join(", ") : String(schema.type ?? schema.const ?? "any");
}

function operation(path, method, found) {
  const schema = found.requestBody?.content?.["application/json"]?.schema;
  const parts = [];
  if (schema) {
    const wanted = new Set(schema.required || []);
    const rows = Object.entries(schema.properties).map(([name, part]) =>
      el("tr", {}, el("td", {}, el("code", {}, name)), el("td", {}, typeOf(part)), el("td", {}, wanted.has(name) ? "required" : "optional")));
    const head = el("tr", {}, ["Field", "Type", ""].map((text) => el("th", { scope: "col" }, text)));
    parts.push(el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Fields of ${path}` }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows))));
    parts.push(el("p", { class: "muted" }, "The gateway reads these fields; all others go to the engine as they are."));
  }
  const body = schema ? ` \\\n  -H 'content-type: application/json' \\\n  -d '${JSON.stringify(exampleOf(schema))}'` : "";
  parts.push(el("pre", { tabindex: 0 }, `curl ${location.origin}${path} \\\n  -H "authorization: Bearer $KEY"${body}`));
  const answers = Object.entries(found.responses).map(([status, said]) => el("li", {}, `${status}: ${said.description}`));
  parts.push(el("details", {}, el("summary", {}, "Answers"), el("ul", {}, answers)));
  return el("section", { class: "card" }, el("h2", {}, `${method.toUpperCase()} ${path}`), el("p", {}, found.summary || ""), parts);
}

fetch("openapi.json")
  .then((answer) => answer.json())
  .then((told) => {
    setText(byId("about"), `${told.info.version}, OpenAPI ${told.openapi}`);
    setText(byId("description"), told.info.description);
    for (const [path, methods] of Object.entries(told.paths)) {
      for (const [method, found] of Object.entries(methods)) byId("operations").append(operation(path, method, found));
    }
  })
  .catch((error) => setText(byId("description"), `The description could not be read: ${error.message}`));
