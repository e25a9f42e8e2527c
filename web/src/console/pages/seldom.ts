// The pages that few visits open: one script, fetched when the page has shown what most visits are for.

export { Overview } from "./overview.js";
export { Topics } from "./topics.js";
