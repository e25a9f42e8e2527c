// Short texts that this browser keeps for the page, or the page for itself where the browser does not.

const here = new Map<string, string>();

/** The text that was kept under this name, at an earlier visit too where the browser allows it; null if none was. */
export function kept(name: string): string | null {
  try {
    return here.get(name) ?? localStorage.getItem(name);
  } catch {
    return null; // this browser keeps nothing for the page
  }
}

/** Keep a text, or with null none. */
export function keepText(name: string, text: string | null): void {
  here.delete(name);
  try {
    if (text === null) localStorage.removeItem(name);
    else localStorage.setItem(name, text);
  } catch {
    if (text !== null) here.set(name, text); // for this visit, then
  }
}

/** Whether the browser keeps anything for the page at all: people may forbid it, and both kinds of store go together. */
export function isOpen(): boolean {
  try {
    return globalThis.localStorage !== undefined;
  } catch {
    return false;
  }
}
