// What the relay says about itself: its manifest.

import { signal } from "@preact/signals";

export interface Manifest {
  readonly relay_id: string;
  readonly ws_endpoint: string;
  readonly status: string;
  readonly software: { readonly name: string; readonly version: string };
  readonly clock_skew_seconds: number;
  readonly recovery_delay_seconds: number;
  readonly limits: Readonly<Record<string, unknown>>;
  readonly auth: {
    readonly required_for: readonly string[];
    readonly challenge_lifetime_seconds: number;
    readonly members_only: boolean;
    readonly capabilities: readonly string[];
  };
  readonly policy: Readonly<Record<string, unknown>>;
}

export const manifest = signal<Manifest | null>(null);

/** Fetch the manifest; without an answer the last one stays. */
export async function refreshManifest(): Promise<void> {
  try {
    const answer = await fetch(".well-known/strata-relay.json");
    if (answer.ok) manifest.value = (await answer.json()) as Manifest;
  } catch {
    // The state of the connection shows it.
  }
}
