// Asks the built site's own search what a reader would ask: `node tests/support/site_search.js site`.
// It runs the worker of the theme, with the index that mkdocs has written, and compares the first page found.

const fs = require("fs");
const path = require("path");
const vm = require("vm");

const FIRST = {
  "load_from_checkpoint": ["quickstart.html", "checkpoints.html"],
  "gradient clipping": ["concepts.html"],
  "torchrun": ["quickstart.html"],
  "batch size": ["configuration.html"],
  "resume": ["quickstart.html", "checkpoints.html"],
  "jupyter": ["quickstart.html"],
  "wandb": ["monitoring.html"],
  "offload": ["offload.html"],
  "out of memory": ["out-of-memory.html"],
  "nan": ["troubleshooting.html", "precision.html"],
};

function worker(site) {
  const folder = path.join(site, "assets/javascripts/workers");
  const file = fs.readdirSync(folder).find((name) => name.endsWith(".js"));
  const handlers = [];
  const scope = {
    console, URL, setTimeout, clearTimeout, performance,
    answers: [],
    location: { href: "file:///", origin: "file://" },
    importScripts: () => {},
    addEventListener: (kind, handler) => kind === "message" && handlers.push(handler),
  };
  scope.postMessage = (message) => scope.answers.push(message);
  scope.self = scope.window = scope.globalThis = scope;
  vm.runInContext(fs.readFileSync(path.join(folder, file), "utf8"), vm.createContext(scope));
  return async (type, data, answer) => {
    scope.answers.length = 0;
    for (const handler of handlers) await handler({ data: { type, data } });
    for (let waited = 0; waited < 600; waited++) {
      const found = scope.answers.find((message) => message.type === answer);
      if (found) return found.data;
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
    throw new Error(`the search worker did not answer message ${type}`);
  };
}

async function main(site) {
  const SETUP = 0, READY = 1, QUERY = 2, RESULT = 3;
  const ask = worker(site);
  const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));
  await ask(SETUP, { config: index.config, docs: index.docs, options: {} }, READY);
  let wrong = 0;
  for (const [query, pages] of Object.entries(FIRST)) {
    const { items } = await ask(QUERY, query, RESULT);
    const first = items.length ? items[0][0].location : "nothing";
    const right = pages.includes(first.split("#")[0]);
    wrong += !right;
    console.log(`${right ? "ok  " : "FAIL"} ${query}: ${first}${right ? "" : `, not ${pages.join(" or ")}`}`);
  }
  process.exit(wrong ? 1 : 0);
}

main(process.argv[2]);
