// Short texts that this browser stores for the page, or that the page keeps itself if the browser does not.

const here = new Map<string, string>();

/** The text that was kept under this name, even at an earlier visit if the browser allows it; null if there is none. */
export function kept(name: string): string | null {
  try {
    return here.get(name) ?? localStorage.getItem(name);
  } catch {
    return null; // this browser stores nothing for the page
  }
}

/** Keep a text; null removes it. */
export function keepText(name: string, text: string | null): void {
  here.delete(name);
  try {
    if (text === null) localStorage.removeItem(name);
    else localStorage.setItem(name, text);
  } catch {
    if (text !== null) here.set(name, text); // for this visit only
  }
}

/** Whether the browser stores anything for the page: people may forbid it, for localStorage and IndexedDB together. */
export function isOpen(): boolean {
  try {
    return globalThis.localStorage !== undefined;
  } catch {
    return false;
  }
}
