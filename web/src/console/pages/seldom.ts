// The pages that few visits open, in one script that is fetched after the first packets are shown.

export { Overview } from "./overview.js";
export { Topics } from "./topics.js";
