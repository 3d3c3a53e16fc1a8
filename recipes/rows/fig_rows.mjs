// Writes one JSON line {tool, task, command} per described subcommand and option of the completion specs in the
// npm package @withfig/autocomplete (MIT). Only what a spec states literally is taken: no generator is called.
// usage: node fig_rows.mjs PACKAGE_DIR > rows.jsonl
import { readdirSync } from "node:fs";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const list = (x) => (x == null ? [] : Array.isArray(x) ? x : [x]);
const one = (s) => s.replace(/\s+/g, " ").trim();
const placeholder = (a) => {
  const name = one(String(a.name ?? "arg")).toLowerCase().replace(/[<>[\]]/g, "").replace(/ /g, "-");
  const shown = `<${name}>${a.isVariadic ? "..." : ""}`;
  return a.isOptional ? `[${shown}]` : shown;
};
const args = (node) => list(node.args).map(placeholder);

function emit(tool, description, words) {
  if (typeof description !== "string") return;
  const task = one(description), command = words.filter(Boolean).join(" ");
  if (task.length < 8 || task.length > 90 || command.length > 90) return;
  process.stdout.write(JSON.stringify({ tool, task, command }) + "\n");
}

function walk(tool, node, path) {
  emit(tool, node.description, [...path, ...args(node)]);
  for (const o of list(node.options)) {
    const names = list(o.name), long = names.find((n) => n.startsWith("--")) ?? names[0];
    if (typeof long === "string") emit(tool, o.description, [...path, long, ...args(o), ...args(node)]);
  }
  for (const s of list(node.subcommands)) {
    const name = list(s.name)[0];
    if (typeof name === "string") walk(tool, s, [...path, name]);
  }
}

const build = join(resolve(process.argv[2]), "build");
for (const file of readdirSync(build).filter((f) => f.endsWith(".js")).sort()) {
  try {
    const module = await import(pathToFileURL(join(build, file)));
    const spec = module.default?.default ?? module.default;
    if (spec && typeof spec === "object" && typeof list(spec.name)[0] === "string") {
      walk(list(spec.name)[0], spec, [list(spec.name)[0]]);
    }
  } catch (error) {
    process.stderr.write(`${file}: skipped, ${String(error.message ?? error).split("\n")[0]}\n`);
  }
}
process.exit(0);
